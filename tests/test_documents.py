"""What people read runs: the notebooks from top to bottom, the README's Python and commands; links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "examples").rglob("*.md"), ROOT / "space_app" / "README.md"])

NOT_RUN = {
    "python3 -m venv": "CI runs the two set-up commands themselves",
    "pip install": "installs",
    "accelerate launch": "trains heads of Janus-Pro-7B; tests/training runs the same commands on tiny models",
    "M=": "for those",
    'ssd-pipelines generate "a red fox': "needs Janus-Pro-7B",
    "ssd-pipelines demo": "serves until it is stopped; tests/demo has the page",
}


def test_there_are_four_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["add_backbone", "compare_decoders", "quickstart", "train_heads"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_for_colab(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata["accelerator"] == "GPU" and notebook.metadata["colab"]["gpuType"] == "T4"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert re.fullmatch(r'%pip install -q "ssd-pipelines(\[[a-z,]+\])?==0\.1\.\*"', code[0].source)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, 4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": ""}
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)  # an exception in a cell is one here
    shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert any(kind.startswith("image/") for output in shown for kind in output["data"]), "something to look at"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


def test_the_readme_s_python_runs(tmp_path):
    (source,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("forward passes for 256 tokens")
    assert Image.open(tmp_path / "squares.png").size == (64, 64)


def test_the_readme_s_commands_run(tmp_path):
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    (first,) = [line for line in lines if "--compare" in line]
    commands = [first.split("&&")[-1].replace(".venv/bin/", ""), *lines]
    ran = []
    for line in commands:
        if any(part in line for part in NOT_RUN):
            if line is not commands[0]:
                continue
        name, *arguments = shlex.split(line, comments=True)
        assert name == "ssd-pipelines", f"neither run here nor explained in NOT_RUN: {line}"
        command = [sys.executable, "-m", "ssd_pipelines", *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, f"{line}: {result.stderr}"
        ran.append(arguments[0])
    assert ran == ["generate", "race", "generate"]
    assert (tmp_path / "race.gif").is_file() and len(list((tmp_path / "outputs").glob("*.png"))) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_and_script_of_the_examples_is_on_their_map():
    map_ = (ROOT / "examples" / "README.md").read_text("utf-8")
    for path in (ROOT / "examples").iterdir():
        if path.suffix in (".md", ".py", "") and path.name not in ("README.md", "__pycache__"):
            assert path.name in map_, f"examples/README.md does not name {path.name}"
