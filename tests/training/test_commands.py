import json

import pytest
from typer.testing import CliRunner

from ssd_pipelines import cli
from ssd_pipelines.testing import tiny_pipeline


def run(*arguments: object) -> str:
    """The command's output; an error is raised as it is, which `main` turns into its one sentence."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(side=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    assert "6 pictures of 4 x 4 codes" in run("distill", "-m", model, "--preset", "tiny", "--num", 6, "-o", folder)
    return folder


SMALL = ["--num-horizontal", 2, "--preset", "tiny", "--epochs", 1]


def test_a_preset_gives_way_to_what_is_asked_for(model, drawn, tmp_path):
    run("train-heads", "-m", model, "--data", drawn, "-o", tmp_path, *SMALL, "--kl-weight", 0, "--no-row-head")
    training = json.loads((tmp_path / "config.json").read_text())["training"]
    assert (training["batch_size"], training["epochs"], training["kl_weight"]) == (16, 1, 0)
    assert training["lr"] == pytest.approx(10 * training["min_lr"]) == 2e-3
    assert "row+1" not in training["validation"]
    manifest = json.loads((drawn / "manifest.json").read_text())
    assert (manifest["pictures"], manifest["batch_size"]) == (6, 32)


def test_the_paper_s_heads_are_a_preset(model, drawn, tmp_path):
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    arguments = ["--preset", "paper", "--num-horizontal", 2, "--epochs", 1]
    output = run("train-heads", "-m", model, "--data", drawn, "-o", tmp_path, *arguments)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["neighborhood"], config["row_head"]) == ("cell", False)
    training = config["training"]
    assert (training["kl_weight"], training["lr"], training["min_lr"]) == (0, 1e-4, 1e-5)
    assert (training["warmup_steps"], training["prompt_dropout"], training["betas"]) == (20, 0.1, [0.9, 0.95])
    assert "lossless decoding takes" in output and "autoregressive decoding 16" in output
    assert before == {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}, "the model's own files"


def test_curves_go_to_a_tracker(model, drawn, tmp_path):
    run("train-heads", "-m", model, "--data", drawn, "-o", tmp_path, *SMALL, "--report-to", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / "ssd-heads").glob("events*")
    curves = EventAccumulator(str(events)).Reload()
    assert {"validation/vertical+1/expected_acceptance", "passes/mean"} <= set(curves.Tags()["scalars"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report-to", "trackio"], "`--report-to trackio` needs the trackio library: pip install trackio"),
        (["--data", "{empty}"], "has no shard"),
        (["--num-vertical", "9"], "`num_vertical` must lie between 1 and 3"),
        (["--prompt-dropout", "2"], "`prompt_dropout` must lie in"),
    ],
)
def test_what_can_t_work_is_said_in_one_sentence(model, drawn, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("ssd_pipelines.cli.heads.find_spec", lambda name: None)
    (tmp_path / "empty").mkdir()
    arguments = [argument.format(empty=tmp_path / "empty") for argument in arguments]
    with pytest.raises(ValueError, match=message):
        run("train-heads", "-m", model, "--data", drawn, "-o", tmp_path / "out", *SMALL, *arguments)
    assert not (tmp_path / "out" / "config.json").exists()


def test_drawing_needs_prompts(model, tmp_path):
    with pytest.raises(ValueError, match="Say what to draw"):
        run("distill", "-m", model, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_run_is_not_continued(model, drawn, tmp_path):
    run("train-heads", "-m", model, "--data", drawn, "-o", tmp_path, *SMALL)
    with pytest.raises(ValueError, match="holds a run of other settings or data .kl_weight 1.0 there, 0.5 here"):
        run("train-heads", "-m", model, "--data", drawn, "-o", tmp_path, *SMALL, "--kl-weight", 0.5)
