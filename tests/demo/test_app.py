"""The page through its API: what a visitor asks for is drawn, and what nobody may do is refused."""

import importlib
import json
import re
import sys
import threading
import time
import tomllib
import types
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gradio_client import Client
from PIL import Image

from ssd_pipelines.demo import create_app, launch, load_model
from ssd_pipelines.demo.models import on_gpu
from ssd_pipelines.demo.streaming import stream


ROOT = Path(__file__).parents[2]
PROMPT = "a ring above a cross"
NAME = "Scenes (embedded, 1.7 M parameters)"


def status(address: str, path: str) -> int:
    try:
        return urllib.request.urlopen(address.rstrip("/") + path).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def client(page) -> Client:
    return Client(page, verbose=False)


def test_the_picture_is_the_one_of_the_pipeline_with_this_seed(client, model):
    told, seed, gallery = client.predict(PROMPT, 7, False, NAME, 1, "SSD, lossless", 1.2, 1, 0.95, api_name="/generate")
    assert seed == 7 and re.match(r"\d+ passes for 256 tokens per picture", told)
    assert [entry["caption"] for entry in gallery] == ["seed 7"]
    plain = model.view()(PROMPT, generator=torch.Generator().manual_seed(7)).images[0]
    drawn = Image.open(gallery[0]["image"]).convert("RGB")
    assert np.array_equal(np.asarray(drawn), np.asarray(plain)), "as PNG, so without loss"


def test_previews_come_before_the_picture(client):
    job = client.submit(PROMPT, 0, False, NAME, 2, "Autoregressive", 1.2, 1, 0.95, api_name="/generate")
    job.result()
    steps = [output[0] for output in job.outputs()]
    assert any(re.match(r"\d+ passes, at most \d+ left", text) for text in steps[:-1])
    assert [entry["caption"] for entry in job.outputs()[-1][2]] == ["seed 0", "seed 1"]


def test_a_new_seed_is_told_and_can_be_used_again(client):
    _, first, gallery = client.predict(PROMPT, 0, True, NAME, 1, "SSD, lossless", 1.2, 1, 0.95, api_name="/generate")
    _, second, again = client.predict(
        PROMPT, first, False, NAME, 1, "SSD, lossless", 1.2, 1, 0.95, api_name="/generate"
    )
    assert first == second and gallery[0]["caption"] == f"seed {first}"
    assert Path(gallery[0]["image"]).read_bytes() == Path(again[0]["image"]).read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "  "}, "The prompt is empty"),
        ({"prompt": "x" * 501}, "shorten it to 500|maximum"),
        ({"seed": -1}, "The seed must be|minimum value"),
        ({"model": "/etc"}, "There is no model '/etc' here|not in the list"),
        ({"count": 9}, "Between 1 and 4 pictures|maximum value"),
        ({"decoder": "nobody"}, "can't be used|not in the list"),
        ({"top_p": 0}, "`top_p` must lie in"),
        ({"guidance": -2}, "guidance_scale|minimum value"),
    ],
)
def test_bad_input_is_answered_in_words(client, changes, words):
    call = {
        "prompt": PROMPT,
        "seed": 0,
        "new_seed": False,
        "model": NAME,
        "count": 1,
        "decoder": "SSD, lossless",
        "guidance": 1.2,
        "temperature": 1,
        "top_p": 0.95,
    }
    with pytest.raises(Exception, match=words):
        client.predict(*{**call, **changes}.values(), api_name="/generate")


def test_a_race_has_every_decoder(client):
    told, seed, race = client.predict(PROMPT, 0, False, NAME, api_name="/race")
    race = race["value"] if isinstance(race, dict) and "value" in race else race
    assert [lane["title"] for lane in race["lanes"]][0] == "Autoregressive" and len(race["lanes"]) == 5
    assert race["lanes"][-1]["matches"] and race["model"] == NAME
    assert told.startswith("Recorded. Passes: Autoregressive 256")


def test_a_look_inside_says_what_differs(client):
    told, _, maps, rows, drafts = client.predict(PROMPT, 0, False, NAME, "SSD, lossless", api_name="/inside")
    assert "No code differs from autoregressive decoding" in told
    told, *_ = client.predict(PROMPT, 0, False, NAME, "SSD, paper", api_name="/inside")
    assert re.search(r"\d+ of 256 codes differ", told)


def test_two_visitors_get_their_own_pictures(page):
    results: dict[str, str] = {}

    def visit(prompt: str) -> None:
        output = Client(page, verbose=False).predict(
            prompt, 3, False, NAME, 1, "SSD, lossless", 1.2, 1, 0.95, api_name="/generate"
        )
        results[prompt] = output[2][0]["image"]

    visitors = [threading.Thread(target=visit, args=(prompt,)) for prompt in ("a red ring", "a blue square")]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    red, blue = (np.asarray(Image.open(results[p]).convert("RGB"), int) for p in ("a red ring", "a blue square"))
    assert ((red[..., 0] - red[..., 2]) > 80).any() and not ((red[..., 2] - red[..., 0]) > 80).any()
    assert ((blue[..., 2] - blue[..., 0]) > 80).any() and not ((blue[..., 0] - blue[..., 2]) > 80).any()


def test_a_cancelled_call_stops_the_model(client, model):
    passes = []
    counter = model.pipe.backbone.model.language_model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        job = client.submit(PROMPT, 0, False, NAME, 4, "Autoregressive", 1.2, 1, 0.95, api_name="/generate")
        while len(passes) < 5:
            time.sleep(0.01)
        assert job.cancel()
        time.sleep(1.0)
        made = len(passes)
        time.sleep(1.0)
        assert made == len(passes) < 256
    finally:
        counter.remove()


def test_no_file_is_served_but_the_pages_own(page):
    for path in ("/etc/passwd", str(ROOT / "pyproject.toml"), str(ROOT / "README.md"), "../README.md"):
        assert status(page, "/gradio_api/file=" + urllib.parse.quote(path)) in (403, 404)
        assert status(page, "/file=" + urllib.parse.quote(path)) in (403, 404)


def test_uploads_are_refused_above_a_kilobyte(page):
    boundary = "x"
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n{"y" * 5000}\r\n'
        f"--{boundary}--\r\n"
    ).encode()
    request = urllib.request.Request(
        page.rstrip("/") + "/gradio_api/upload",
        body,
        {"Content-Type": f"multipart/form-data; boundary={boundary}"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 413


def test_the_page_listens_on_this_machine_only(page):
    assert urllib.parse.urlparse(page).hostname == "127.0.0.1"


def test_the_public_api_is_the_three_tabs(page):
    info = json.loads(urllib.request.urlopen(page.rstrip("/") + "/gradio_api/info").read())
    assert set(info["named_endpoints"]) == {"/race", "/generate", "/inside"}


def test_a_model_without_heads_offers_the_decoders_that_need_none(model):
    from ssd_pipelines import SpatialSpeculativePipeline
    from ssd_pipelines.demo import DemoModel

    bare = SpatialSpeculativePipeline(**{**model.pipe.components, "heads": None, "verifier": None})
    app = create_app([DemoModel("Bare", bare, "", "", ("a ring",))])
    _, address, _ = launch(app, prevent_thread_lock=True, quiet=True)
    try:
        client = Client(address, verbose=False)
        told, *_ = client.predict("a ring", 0, False, "Bare", api_name="/race")
        assert told.startswith("Recorded.") and "ZipAR" in told and "SSD" not in told
        told, *_ = client.predict("a ring", 0, False, "Bare", "Jacobi (SJD)", api_name="/inside")
        assert "Jacobi" in told
    finally:
        app.close()


# --- work that reports as it goes


def test_a_stream_yields_reports_and_returns_the_result():
    def work(report):
        for number in range(3):
            report(number)
            time.sleep(0.05)
        return "done"

    steps = stream(work)
    seen = []
    with pytest.raises(StopIteration) as finished:
        while True:
            seen.append(next(steps))
    assert seen[-1] == 2 and finished.value.value == "done"


def test_closing_a_stream_stops_the_work():
    stopped = threading.Event()

    def work(report):
        while not report(0):
            time.sleep(0.01)
        stopped.set()

    steps = stream(work)
    next(steps)
    steps.close()
    assert stopped.is_set()


def test_an_error_in_the_work_reaches_the_reader():
    def work(report):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        next(stream(work))


# --- the Space


def test_on_zerogpu_the_functions_ask_for_a_gpu_and_elsewhere_not(monkeypatch):
    asked = []

    def gpu(duration):
        asked.append(duration)
        return lambda function: lambda *args: ("on a GPU", function(*args))

    monkeypatch.setitem(sys.modules, "spaces", types.SimpleNamespace(GPU=gpu))
    assert on_gpu(seconds=60)(lambda x: x + 1)(1) == ("on a GPU", 2) and asked == [60]
    monkeypatch.setitem(sys.modules, "spaces", None)
    assert on_gpu(seconds=60)(lambda x: x + 1)(1) == 2


def test_the_space_names_its_app_and_pins_what_it_needs():
    text = (ROOT / "space_app" / "README.md").read_text("utf-8")
    front = yaml.safe_load(text.split("---")[1])
    assert (ROOT / "space_app" / front["app_file"]).is_file()
    assert front["sdk"] == "gradio" and len(front["short_description"]) <= 60
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = dict(line.split("==") for line in _requirements() if "==" in line)
    assert pinned["ssd-pipelines[demo]"] == project["version"]
    assert pinned["torch"] in ("2.8.0", "2.9.1", "2.10.0", "2.11.0"), "what ZeroGPU has"
    low, high = re.search(r"gradio>=(\d+\.\d+),<(\d+)", str(project["optional-dependencies"]["demo"])).groups()
    version = [int(part) for part in front["sdk_version"].split(".")]
    assert [int(part) for part in low.split(".")] <= version[:2] and version[0] < int(high)
    assert front["python_version"] in ("3.11", "3.12", "3.13")


def _requirements() -> list[str]:
    return (ROOT / "space_app" / "requirements.txt").read_text("utf-8").split()


def test_the_space_app_builds_the_page_from_its_variables(monkeypatch):
    import ssd_pipelines.demo as demo

    asked = []
    monkeypatch.setattr(demo, "load_model", lambda *args: asked.append(args) or load_model(device="cpu"))
    monkeypatch.setenv("SSD_MODEL", "user/backbone")
    monkeypatch.setenv("SSD_HEADS", "user/heads")
    monkeypatch.syspath_prepend(str(ROOT / "space_app"))
    module = importlib.import_module("app")
    assert asked == [("user/backbone", "user/heads")] and type(module.demo).__name__ == "Blocks"
