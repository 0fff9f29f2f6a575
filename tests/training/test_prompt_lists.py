import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from ssd_pipelines.scenes import evaluation_tasks
from ssd_pipelines.training import clean_prompts, read_prompts
from ssd_pipelines.training.prompts import is_geneval


@pytest.mark.parametrize(
    "prompt",
    [
        "a photo of a bench",
        "a photo of an orange and a tv remote",
        "a photo of three persons",
        "a photo of two toothbrushs",
        "a photo of four knives",
        "a photo of a dog right of a teddy bear",
        "a photo of a purple suitcase and an orange pizza",
    ],
)
def test_a_prompt_in_geneval_s_wording_is_known_by_it(prompt):
    assert is_geneval(prompt)


@pytest.mark.parametrize("prompt", ["a bench", "a photo of a bench at night", "a photo of a fox", "a photo of a"])
def test_prompts_about_the_same_things_stay(prompt):
    assert not is_geneval(prompt)


def test_prompts_of_evaluations_are_left_out_whatever_their_case_and_punctuation(tmp_path):
    scene = evaluation_tasks(6)[4].prompt
    (tmp_path / "dpg").mkdir()
    (tmp_path / "dpg" / "1.txt").write_text("A long prompt,\nover two lines.\n")
    lines = [scene.upper() + "!", "A photo of a dog, above a cat.", "a long  prompt over two lines", "a fox", "A Fox."]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    assert read_prompts(tmp_path / "list.txt", exclude=[tmp_path / "dpg"]) == ["a fox"]
    assert len(read_prompts(tmp_path / "list.txt")) == 2


def test_flags_addresses_and_repetitions_go():
    raw = ["  a fox  --v 5 --ar 16:9 ", "see https://x.org/a a hen", "", "...", "a hen --tile", "A hen", "well-known"]
    assert clean_prompts(raw) == ["a fox", "see a hen", "a hen", "well-known"]


def test_our_own_grammar_is_seeded():
    assert (
        read_prompts("scenes", 20, seed=3) == read_prompts("scenes", 20, seed=3) != read_prompts("scenes", 20, seed=4)
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n\n", "has no prompts"),
        ("torn.jsonl", '{"prompt": "a fox"}\n{"prompt"', "line 2, is not valid JSON"),
        ("other.jsonl", '{"picture": "a fox"}', "line 1, has no text in prompt or text or caption; it has picture"),
        ("missing.txt", None, "is not a file of prompts: give a text file"),
        ("folder/missing.jsonl", None, "is not a file of prompts: give a text file"),
    ],
)
def test_a_list_that_can_t_be_read_gets_one_sentence(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(name)


def test_the_hub_without_the_datasets_library_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the `datasets` library: pip install 'ssd-pipelines\[train\]'"):
        read_prompts("user/prompts")


COMMIT = "a" * 40
ROWS = b"".join(json.dumps({"prompt": f"a fox number {k} --v 5", "other": k}).encode() + b"\n" for k in range(500))


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of the Hub that reading a public data set of one file takes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.split("?")[0]
        if path in ("/api/datasets/user/prompts", f"/api/datasets/user/prompts/revision/{COMMIT}"):
            self.answer(200, json.dumps({"id": "user/prompts", "sha": COMMIT, "siblings": [], "tags": []}).encode())
        elif path == f"/api/datasets/user/prompts/tree/{COMMIT}":
            file = {"type": "file", "path": "data.jsonl", "oid": "b" * 40, "size": len(ROWS)}
            self.answer(200, json.dumps([file]).encode())
        elif path == f"/datasets/user/prompts/resolve/{COMMIT}/data.jsonl":
            self.answer(200, ROWS)
        else:
            known = "datasets/user/prompts" in path
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {
            "Content-Length": len(body),
            "ETag": '"x"',
            "X-Repo-Commit": COMMIT,
            **(headers or {}),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


READ = """
from ssd_pipelines.training import read_prompts
print(read_prompts("user/prompts", 3))
print(len(read_prompts("user/prompts:prompt")))
for wrong in ("user/prompts:caption", "user/none"):
    try:
        read_prompts(wrong, 3)
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_prompts_stream_from_a_data_set_on_the_hub(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", READ], env={**os.environ, **place}, capture_output=True, text=True, timeout=300
        )
    finally:
        server.shutdown()
    assert result.returncode == 0, result.stderr[-3000:]
    few, number, column, repository = result.stdout.strip().splitlines()
    assert few == str([f"a fox number {k}" for k in range(3)])
    assert number == "500"
    assert column == "user/prompts has no text in caption; it has prompt, other."
    assert repository.startswith(
        "user/none is not a local file, and no data set on the Hub that can be read with this token"
    )
