import json
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from ssd_pipelines import SpatialDraftVerifier, cli
from ssd_pipelines.pictures import read_settings, side_by_side
from ssd_pipelines.testing import tiny_family, tiny_pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved pipeline with heads, and the same without."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = tiny_pipeline(side=8, verifier=SpatialDraftVerifier.paper(draft="sample"))
    pipe.save_pretrained(folder / "with_heads")
    pipe.unload_ssd_heads()
    pipe.save_pretrained(folder / "without_heads")
    return folder


def run(*arguments: object) -> str:
    """The command's output; an error is raised as it is, which `main` turns into its one sentence."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def pixels(path) -> list:
    return list(Image.open(path).getdata())


def test_generate_says_what_it_did_and_saves_a_picture_for_every_prompt_and_number(saved, tmp_path):
    output = run("generate", "a red circle", "a blue square", "-n", 2, "-m", saved / "with_heads", "-o", tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a-blue-square-2.png", "a-blue-square-3.png", "a-red-circle-0.png", "a-red-circle-1.png"]
    assert Image.open(tmp_path / names[0]).size == (32, 32)
    # 1 for the prompt, 2 blocks of a round and a commit in row 1, and 3 passes in each of 7 rows
    assert "spatially speculative: 26 passes (2.5 tokens a pass)" in output
    assert "of the drafts accepted" in output


def test_a_picture_s_metadata_draws_it_again(saved, tmp_path):
    arguments = ["--seed", 5, "--rounds", 1, "--temperature", 0.9, "--top-k", 20, "--guidance-scale", 2.5]
    run("generate", "a red circle", "a photo of a green triangle above the blue square", "-m", saved / "with_heads",
        "-o", tmp_path / "first", *arguments)  # fmt: skip
    for first in (tmp_path / "first").iterdir():
        run("generate", "--like", first, "-o", tmp_path / "again")
        again = tmp_path / "again" / first.name
        assert pixels(first) == pixels(again)
        assert read_settings(first) == read_settings(again)
    assert read_settings(first)["verifier"]["rounds"] == 1


def test_compare_saves_both_pictures_side_by_side(saved, tmp_path, monkeypatch):
    captions = []

    def recorded(pictures, title, **settings):
        captions.extend(caption for _, caption in pictures)
        return side_by_side(pictures, title, **settings)

    monkeypatch.setattr("ssd_pipelines.pictures.side_by_side", recorded)
    output = run("generate", "a red circle", "-m", saved / "with_heads", "-o", tmp_path, "--compare")
    sheet = Image.open(tmp_path / "a-red-circle-0-compare.png")
    assert sheet.width > 2 * 320
    assert "autoregressive: 64 passes (1.0 tokens a pass)" in output
    assert "2.5 times fewer passes" in output
    assert [caption[0] for caption in captions] == ["autoregressive", "spatially speculative"]
    for (_, line), passes in zip(captions, (64, 26), strict=True):
        assert re.fullmatch(rf"{passes} passes, \d+\.\d\d s", line)


def test_without_heads_the_command_decodes_autoregressively(saved, tmp_path):
    output = run("generate", "a red circle", "-m", saved / "without_heads", "-o", tmp_path)
    assert "autoregressive: 64 passes" in output
    with_heads = run("generate", "a red circle", "-m", saved / "with_heads", "-o", tmp_path / "ar", "--decoder", "ar")
    assert "autoregressive: 64 passes" in with_heads
    assert pixels(tmp_path / "a-red-circle-0.png") == pixels(tmp_path / "ar" / "a-red-circle-0.png")


def test_heads_can_come_from_elsewhere(saved, tmp_path):
    heads = saved / "with_heads" / "heads"
    output = run("generate", "a red circle", "-m", saved / "without_heads", "--heads", heads, "-o", tmp_path)
    assert "spatially speculative" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "Say what to draw"),
        (["generate", "x", "--like", "y.png"], "not both"),
        (["generate", "--like", "y.png", "--seed", "0", "--top-k", "3"], "leave out `--seed`, `--top-k`"),
        (["generate", "--like", "missing.png"], "can't be read|not a picture"),
        (["generate", "x", "-m", "{without_heads}", "--rounds", "1"], "has no draft heads"),
        (["generate", "x", "-m", "{without_heads}", "--compare"], "has no draft heads"),
        (["generate", "x", "-m", "{with_heads}", "--decoder", "ar", "--rounds", "1"], "belong to speculative decoding"),
        (["generate", "x", "-m", "{with_heads}", "--decoder", "ar", "--compare"], "leave out `--decoder ar`"),
        (["generate", "x", "-m", "{with_heads}", "--temperature", "-1"], "`temperature` must be 0"),
        (["generate", "x", "-m", "{with_heads}", "--top-p", "1.5"], "`top_p` must lie in"),
        (["generate", "x", "-m", "{with_heads}", "--guidance-scale", "-1"], "`guidance_scale` must be"),
        (["generate", "x", "-m", "{with_heads}", "--block-size", "7"], "draft heads have 2 vertical offsets"),
        (["generate", "x", "-m", "{with_heads}", "--device", "tpu9"], "`--device` must be like"),
        (["generate", "x", "-m", "{empty}"], "neither a model_index.json"),
        (["generate", "x", "-m", "{with_heads}", "--heads", "{empty}"], "config.json"),
        (["benchmark", "scenes", "--rounds", "1;2"], "takes whole numbers with commas"),
    ],
)
def test_a_wrong_flag_gets_one_sentence_that_helps(saved, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", **{name: saved / name for name in ("with_heads", "without_heads")}}
    destination = ["-o", tmp_path / "out"] if arguments[0] == "generate" else []
    with pytest.raises((ValueError, OSError), match=message):
        run(*[argument.format(**places) for argument in arguments], *destination)
    assert not (tmp_path / "out").exists()


def test_the_command_shows_an_error_without_a_traceback(saved):
    command = [sys.executable, "-m", "ssd_pipelines", "generate", "x", "-m", str(saved / "with_heads"), "--top-k", "-3"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1] == (
        "Error: `top_k` must be 0 (keep all codes) or a positive whole number, got -3."
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("flag", ["--roundz", "--num_images"])
def test_a_misspelt_flag_is_named(flag):
    result = CliRunner().invoke(cli.app, ["generate", "x", flag, "1"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_help_does_not_wait_for_torch():
    code = "import sys; from ssd_pipelines import cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_png_of_somebody_else_is_no_recipe(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    with pytest.raises(ValueError, match="carries no settings"):
        read_settings(tmp_path / "plain.png")


def test_a_long_caption_is_made_to_fit():
    picture = Image.new("RGB", (64, 64), "red")
    sheet = side_by_side([(picture, ["word " * 40]), (picture, ["short"])], "title " * 60)
    assert sheet.size == side_by_side([(picture, ["a"]), (picture, ["b"])], "t").size


def test_a_family_with_sizes_takes_them_and_remembers_them(tmp_path):
    tiny_family("emu3").save_pretrained(tmp_path / "emu3")
    size = ("--height", 16, "--width", 64, "--decoder", "ar")  # the heads are for square grids
    run("generate", "a red circle", "-m", tmp_path / "emu3", *size, "-o", tmp_path / "first")
    (first,) = (tmp_path / "first").glob("*.png")
    assert Image.open(first).size == (64, 16)
    run("generate", "--like", first, "-o", tmp_path / "again")
    assert Image.open(tmp_path / "again" / first.name).tobytes() == Image.open(first).tobytes()


def test_settings_are_plain_json(saved, tmp_path):
    run("generate", "a red circle", "-m", saved / "with_heads", "-o", tmp_path)
    settings = read_settings(tmp_path / "a-red-circle-0.png")
    assert json.loads(json.dumps(settings)) == settings
    assert {"prompt", "seed", "model", "heads", "guidance_scale", "dtype", "nfe", "version"} <= set(settings)
    # What the backbone recommends may change with a release: what was drawn with is written out.
    assert None not in (settings["verifier"][name] for name in ("temperature", "top_k", "top_p"))
    assert set(settings["libraries"]) == {"torch", "transformers", "diffusers"} and "revision" in settings
    assert torch.Generator().manual_seed(settings["seed"])


def test_the_cost_of_wide_passes_is_told_in_autoregressive_steps(saved):
    output = run("benchmark", "cost", "-m", saved / "with_heads", "--widths", "1,8", "--repeats", 1)
    assert "in autoregressive steps" in output
    with pytest.raises(ValueError, match="Widths must lie between 1 and 32, got"):
        run("benchmark", "cost", "-m", saved / "with_heads", "--widths", "99")


def test_pictures_are_drawn_heads_trained_on_them_and_used_by_commands_alone(saved, tmp_path):
    model = saved / "without_heads"
    (tmp_path / "prompts.txt").write_text("a red circle --ar 16:9\nA red circle\na blue square\n\na green triangle\n")
    drawn = ["-m", model, "--prompts", tmp_path / "prompts.txt", "-o", tmp_path / "drawn"]
    assert "3 pictures of 8 x 8 codes" in run("distill", *drawn)
    assert "3 pictures" in run("distill", *drawn), "a rerun goes on, here at its end"
    trained = ["train-heads", "-m", model, "--data", tmp_path / "drawn", "-o", tmp_path / "heads", "--epochs", 2,
               "--batch-size", 2, "--num-horizontal", 5]  # fmt: skip
    plan = run(*trained, "--dry-run")
    assert "2 pictures to learn from, 1 to measure on" in plan and not (tmp_path / "heads").exists()
    output = run(*trained)
    assert "row+1" in output and "vertical+1" in output
    output = run("generate", "a red circle", "-m", model, "--heads", tmp_path / "heads", "-o", tmp_path)
    assert "spatially speculative" in output


def test_prompts_are_cleaned_and_kept_apart_from_those_that_models_are_measured_with(tmp_path):
    from ssd_pipelines.scenes import evaluation_tasks
    from ssd_pipelines.training import clean_prompts, read_prompts

    raw = ["  a fox  --v 5 --ar 16:9 ", "A FOX", "see https://x.org/a a hen", "", "a hen --tile", "well-known"]
    assert clean_prompts(raw) == ["a fox", "see a hen", "a hen", "well-known"]
    measured = evaluation_tasks(6)[4].prompt
    (tmp_path / "list.jsonl").write_text(json.dumps({"prompt": measured}) + "\n" + json.dumps("a fox") + "\n")
    assert read_prompts(tmp_path / "list.jsonl") == ["a fox"]
    assert len(read_prompts("scenes", 5)) == 5
    for source, message in (("missing.txt", "is not a file of prompts"), ("scenes", "say how many")):
        with pytest.raises(ValueError, match=message):
            read_prompts(source)
