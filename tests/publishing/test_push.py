"""Publishing heads and pipelines: every file and the card are checked by a Hub on localhost; nothing unfit is sent."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from fake_hub import READER, TOKEN, FakeHub, check_card, check_files
from huggingface_hub import ModelCard, metadata_load
from PIL import Image
from typer.testing import CliRunner

from ssd_pipelines import SpatialDraftHeads, SpatialDraftVerifier, SpatialSpeculativePipeline, cli
from ssd_pipelines.pictures import read_settings, save_gif
from ssd_pipelines.publishing import Destination, push_heads
from ssd_pipelines.publishing.cards import Figures, LicenseTerms, heads_card, heads_notebook, pipeline_card
from ssd_pipelines.publishing.cards import check_card as check_metadata
from ssd_pipelines.publishing.push import pipeline_facts
from ssd_pipelines.resources import bundled_folder
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_pipeline, tiny_tokenizer


PROMPT = "a photo of a red circle"
FILES = {"README.md", "config.json", "diffusion_pytorch_model.safetensors", "notebook.ipynb", "verifier_config.json"}
TRAINING = {
    "epochs": 3,
    "lr": 1e-4,
    "kl_weight": 1.0,
    "pictures": 1984,
    "betas": [0.9, 0.95],
    "inner_width": None,
    "passes": {"mean": 23.4, "standard_error": 0.5, "autoregressive": 256, "prompts": 8},
    "validation": {
        "horizontal+1": {"loss": 0.10586, "kl": 0.02, "expected_acceptance": 0.96757},
        "vertical+1": {"loss": 0.21541, "kl": 0.04, "expected_acceptance": 0.94089},
    },
}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def write_heads(folder: Path, base_model: str | None = "user/tiny", **config: Any) -> Path:
    heads = tiny_heads(tiny_janus())
    heads.register_to_config(base_model=base_model, training=TRAINING, **config)
    heads.save_pretrained(folder)
    SpatialDraftVerifier(rounds=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    tiny_janus().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def heads_folder(tmp_path: Path) -> Path:
    return write_heads(tmp_path / "heads")


@pytest.fixture
def fake_hub(tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub().reachable() as fake:
        fake.point_here(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        fake.add("user/tiny", backbone, card_data={"license": "mit"})
        yield fake


# --- the repository that comes out ------------------------------------------------------------------------------------


def test_pushed_heads_are_whole_and_load_again_by_their_name(fake_hub: FakeHub, heads_folder: Path) -> None:
    (heads_folder / "checkpoint.safetensors").write_bytes(b"the optimizer's state stays at home")
    output = run("push-heads", heads_folder, "user/ssd-tiny", "--commit-message", "First heads")
    repository = fake_hub.repositories["user/ssd-tiny"]
    files = repository.files()
    assert set(files) == FILES | {".gitattributes"}
    assert repository.messages == ["initial commit", "First heads"]
    assert output.split()[-1].endswith(f"{fake_hub.endpoint}/user/ssd-tiny/commit/{repository.resolve('main')}")
    assert (
        files["diffusion_pytorch_model.safetensors"]
        == (heads_folder / "diffusion_pytorch_model.safetensors").read_bytes()
    )
    assert json.loads(files["verifier_config.json"])["rounds"] == 1

    pipe = SpatialSpeculativePipeline.from_pretrained("user/ssd-tiny")
    assert pipe.verifier.config.rounds == 1
    kept = SpatialDraftHeads.from_pretrained(heads_folder).state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in pipe.heads.state_dict().items())


def test_the_card_says_what_was_measured_how_and_on_what(fake_hub: FakeHub, heads_folder: Path, tmp_path: Path) -> None:
    figures = {
        "AR": {"passes": 256.0, "six_task": 0.897, "standard_error": 0.017, "by_family": {"position": 0.7}},
        "lossless": {"passes": 23.1, "six_task": 0.897, "standard_error": 0.017, "psnr": float("inf")},
    }
    (tmp_path / "decoders.json").write_text(json.dumps(figures))
    (tmp_path / "settings.json").write_text(json.dumps({"num_tasks": 300, "seed": 0}))
    run("push-heads", heads_folder, "user/ssd-tiny", "--figures", tmp_path / "decoders.json",
        "--conditions", "one CPU thread, float32, guidance 1.2, top-p 0.95")  # fmt: skip
    card = fake_hub.repositories["user/ssd-tiny"].files()["README.md"].decode()
    assert "Conditions: 300 prompts, seed 0, one CPU thread, float32, guidance 1.2, top-p 0.95." in card
    assert "| decoder | passes | six-task score | PSNR |" in card
    assert "| lossless | 23.1 | 0.897 ± 0.017 | no picture differs |" in card
    assert "| vertical+1 | 0.2154 | 0.04 | 0.9409 |" in card
    assert "23.4 ± 0.5 passes a picture, where autoregressive decoding makes 256" in card
    for name in ("passes", "six-task score", "expected acceptance", "KL", "PSNR"):
        assert f"- **{name}**: " in card, "every column is defined"
    assert "- **wall ratio**" not in card, "and no other"
    assert "mit, inherited from user/tiny: the heads were trained on its hidden states" in card
    data = ModelCard(card).data.to_dict()
    assert data["base_model"] == "user/tiny"
    assert data["base_model_relation"] == "adapter"
    assert data["library_name"] == "ssd-pipelines", "with diffusers the Hub would print a loader that can't load it"
    assert data["pipeline_tag"] == "text-to-image"
    assert data["license"] == "mit"


def test_pictures_show_on_the_card_and_don_t_say_where_they_were_drawn(
    fake_hub: FakeHub, heads_folder: Path, backbone: Path, tmp_path: Path
) -> None:
    run("generate", PROMPT, "-m", backbone, "--heads", heads_folder, "-o", tmp_path / "drawn")
    picture = tmp_path / "drawn" / "a-photo-of-a-red-circle-0.png"
    run("push-heads", heads_folder, "user/ssd-tiny", "--picture", picture)
    files = fake_hub.repositories["user/ssd-tiny"].files()
    data = check_card(files["README.md"].decode(), files)
    assert data["widget"] == [{"text": PROMPT, "output": {"url": "images/0.png"}}]
    assert str(tmp_path).encode() not in b"".join(files.values())
    (tmp_path / "0.png").write_bytes(files["images/0.png"])
    run("generate", "--like", tmp_path / "0.png", "-o", tmp_path / "again")
    again = tmp_path / "again" / picture.name
    assert Image.open(again).tobytes() == Image.open(picture).tobytes(), "the published heads draw it again"


def test_the_animation_of_a_race_shows_on_the_card_without_the_local_path(
    fake_hub: FakeHub, heads_folder: Path, tmp_path: Path
) -> None:
    frames = [Image.new("L", (8, 8), 80 * index) for index in range(3)]
    save_gif(frames, tmp_path / "race.gif", 100, {"prompt": PROMPT, "model": str(tmp_path), "machine": "this one"})
    run("push-heads", heads_folder, "user/ssd-tiny", "--picture", tmp_path / "race.gif")
    files = fake_hub.repositories["user/ssd-tiny"].files()
    data = check_card(files["README.md"].decode(), files)
    assert data["widget"] == [{"text": PROMPT, "output": {"url": "images/0.gif"}}]
    assert str(tmp_path).encode() not in files["images/0.gif"]
    (tmp_path / "0.gif").write_bytes(files["images/0.gif"])
    with Image.open(tmp_path / "0.gif") as published:
        assert published.n_frames == 3
        assert published.info["duration"] == 100
    assert read_settings(tmp_path / "0.gif")["model"] == "user/ssd-tiny"


def test_the_card_s_snippet_runs(
    fake_hub: FakeHub, heads_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("push-heads", heads_folder, "user/ssd-tiny", "--prompt", PROMPT)
    card = fake_hub.repositories["user/ssd-tiny"].files()["README.md"].decode()
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(code, {})
    assert (tmp_path / "picture.png").is_file()


def test_the_notebook_is_valid_and_its_code_runs(fake_hub: FakeHub, heads_folder: Path, capsys: Any) -> None:
    run("push-heads", heads_folder, "user/ssd-tiny", "--prompt", PROMPT)
    text = fake_hub.repositories["user/ssd-tiny"].files()["notebook.ipynb"].decode()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert "{{" not in text
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%pip"):
            exec(cell.source, names)
    assert "with these heads: " in capsys.readouterr().out
    assert names["reference"].stats.nfe == 16


def test_a_dry_run_shows_card_and_files_and_sends_nothing(fake_hub: FakeHub, heads_folder: Path) -> None:
    output = run("push-heads", heads_folder, "user/ssd-tiny", "--dry-run")
    assert "base_model: user/tiny" in output
    assert all(f"  {name}  " in output for name in FILES)
    assert fake_hub.writes() == []


@pytest.mark.parametrize("way", ["heads", "save_pretrained", "pipe", "function"])
def test_python_pushes_the_same_repository_as_the_command(
    way: str, fake_hub: FakeHub, heads_folder: Path, tmp_path: Path
) -> None:
    run("push-heads", heads_folder, "user/by-command")
    heads, verifier = SpatialDraftHeads.from_pretrained(heads_folder), SpatialDraftVerifier(rounds=1)
    if way == "heads":
        url = heads.push_to_hub("user/by-python", verifier=verifier)
        assert url.startswith(f"{fake_hub.endpoint}/user/by-python/commit/")
    elif way == "save_pretrained":
        verifier.save_pretrained(tmp_path / "by-python")
        heads.save_pretrained(tmp_path / "by-python", push_to_hub=True)  # in the user's own namespace
    elif way == "pipe":
        pipe = SpatialSpeculativePipeline(tiny_janus(), tiny_tokenizer())
        pipe.load_ssd_heads(heads_folder)
        pipe.save_ssd_heads(tmp_path / "saved", push_to_hub=True, repo_id="user/by-python")
    else:
        push_heads(heads_folder, Destination("user/by-python"))
    ours, theirs = (fake_hub.repositories[f"user/by-{name}"].files() for name in ("python", "command"))
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].replace(b"by-python", b"by-command") == theirs[name], name


def test_private_branches_and_pull_requests_work_as_in_diffusers(fake_hub: FakeHub, heads_folder: Path) -> None:
    run("push-heads", heads_folder, "user/ssd-tiny", "--private", "--revision", "v2")
    repository = fake_hub.repositories["user/ssd-tiny"]
    assert repository.private
    assert set(repository.files("main")) == {".gitattributes"}
    assert set(repository.files("v2")) >= FILES
    output = run("push-heads", heads_folder, "user/ssd-tiny", "--create-pr")
    assert output.strip().endswith(f"{fake_hub.endpoint}/user/ssd-tiny/discussions/1")
    assert set(repository.files("main")) == {".gitattributes"}
    assert set(repository.files("refs/pr/1")) >= FILES


# --- what is not sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_model", "message"),
    [
        ("/home/me/janus", "name /home/me/janus as their backbone, which is a path on this machine"),
        ("./janus", "is a path on this machine"),
        ("~/janus", "is a path on this machine"),
        ("C:\\models\\janus", "is a path on this machine"),
        ("checkpoints/janus", "is a folder here"),
        ("a/b/c", "does not look like user/name"),
        ("janus", "does not look like user/name"),
        (None, "don't name their backbone"),
    ],
)
@pytest.mark.parametrize("way", ["command", "python"])
def test_a_backbone_that_looks_like_a_local_path_is_refused(
    way: str, base_model: str | None, message: str, fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "janus").mkdir(parents=True)
    folder = write_heads(tmp_path / "heads", base_model)
    with pytest.raises(ValueError, match=message.replace("\\", "\\\\")):
        if way == "command":
            run("push-heads", folder, "user/ssd-tiny")
        else:
            SpatialDraftHeads.from_pretrained(folder).push_to_hub("user/ssd-tiny")
    assert fake_hub.requests == []


def test_the_hub_s_name_of_the_backbone_can_be_said(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "tiny").mkdir(parents=True)  # a copy of it, say
    folder = write_heads(tmp_path / "heads", str(tmp_path), base_model_revision="f" * 40)
    run("push-heads", folder, "user/ssd-tiny", "--base-model", "user/tiny")
    config = json.loads(fake_hub.repositories["user/ssd-tiny"].files()["config.json"])
    assert (config["base_model"], config["base_model_revision"]) == ("user/tiny", None)


def _as_pickle(folder: Path) -> None:
    weights = folder / "diffusion_pytorch_model.safetensors"
    torch.save({}, weights.with_suffix(".bin"))
    weights.unlink()


def _pickle_in_disguise(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / "diffusion_pytorch_model.safetensors")


def _other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_horizontal": config["num_horizontal"] + 1}))


def _no_heads(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "janus"}')


def _verifier_without_heads(folder: Path) -> None:
    (folder / "verifier_config.json").write_text('{"_class_name": "AutoregressiveVerifier"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_as_pickle, "has diffusion_pytorch_model.bin, a pickle"),
        (_pickle_in_disguise, "is not a safetensors file"),
        (_other_sizes, "don't fit its config.json, in horizontal"),
        (_no_heads, "holds no draft heads"),
        (_verifier_without_heads, "of a AutoregressiveVerifier, which needs no heads"),
        (lambda folder: shutil.rmtree(folder), "holds no draft heads"),
    ],
)
def test_files_that_are_not_fit_are_refused(spoil: Any, message: str, fake_hub: FakeHub, heads_folder: Path) -> None:
    spoil(heads_folder)
    with pytest.raises(ValueError, match=message):
        run("push-heads", heads_folder, "user/ssd-tiny")
    assert fake_hub.writes() == []


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("# no metadata", "has no metadata"),
        ("---\nlicense: [mit\n---\n# x", "can't be read"),
        ("---\n- mit\n---\n# x", "can't be read"),
        ("---\nlicense: mit\nbase_model: user/other\n---\n# x", "names user/other as base model"),
        ("---\nlicense: my own\nbase_model: user/tiny\n---\n# x", "not fit to be published: .*'my own' is no licence"),
        ("---\nlicense: mit\nbase_model: user/tiny\nbase_model_relation: draft\n---\n", "'draft' is no relation"),
    ],
)
def test_a_card_that_the_hub_would_not_read_is_not_sent(
    card: str, message: str, fake_hub: FakeHub, heads_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "card.md").write_text(card)
    with pytest.raises(ValueError, match=message):
        run("push-heads", heads_folder, "user/ssd-tiny", "--card", tmp_path / "card.md")
    assert fake_hub.writes() == []


def test_a_card_of_one_s_own_is_sent_as_it_is(fake_hub: FakeHub, heads_folder: Path, tmp_path: Path) -> None:
    text = "---\nlicense: mit\nbase_model: user/tiny\n---\n# My heads\n"
    (tmp_path / "card.md").write_text(text)
    run("push-heads", heads_folder, "user/ssd-tiny", "--card", tmp_path / "card.md")
    assert fake_hub.repositories["user/ssd-tiny"].files()["README.md"].decode() == text


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_wrong", "did not accept the token for user/tiny"),
        (READER, "The token has no permission to do this with user/ssd-tiny"),
    ],
    ids=["wrong", "without rights"],
)
def test_a_token_that_does_not_serve_is_said_to_be_the_reason(
    token: str, message: str, fake_hub: FakeHub, heads_folder: Path
) -> None:
    with pytest.raises(OSError, match=message) as error:
        run("push-heads", heads_folder, "user/ssd-tiny", "--token", token)
    assert "\n" not in str(error.value)
    assert "user/ssd-tiny" not in fake_hub.repositories


def test_figures_without_their_conditions_are_refused(fake_hub: FakeHub, heads_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text('{"AR": {"passes": 256.0}}')
    with pytest.raises(ValueError, match="not the conditions that they were measured under"):
        run("push-heads", heads_folder, "user/ssd-tiny", "--figures", tmp_path / "figures.json")
    (tmp_path / "figures.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="is not a JSON file of `ssd-pipelines benchmark"):
        run("push-heads", heads_folder, "user/ssd-tiny", "--figures", tmp_path / "figures.json", "--conditions", "x")
    assert fake_hub.requests == []


# --- licences ---------------------------------------------------------------------------------------------------------


def test_a_licence_of_its_own_name_is_inherited_with_name_and_link(fake_hub: FakeHub, heads_folder: Path) -> None:
    theirs = {"license": "other", "license_name": "deepseek", "license_link": "https://example.com/licence"}
    fake_hub.repositories["user/tiny"].card_data = theirs
    run("push-heads", heads_folder, "user/ssd-tiny")
    card = fake_hub.repositories["user/ssd-tiny"].files()["README.md"].decode()
    assert theirs.items() <= ModelCard(card).data.to_dict().items()
    assert "deepseek, inherited from user/tiny" in card


def test_without_a_stated_licence_one_has_to_be_chosen(fake_hub: FakeHub, heads_folder: Path) -> None:
    fake_hub.repositories["user/tiny"].card_data = {}
    with pytest.raises(ValueError, match="user/tiny states no licence that the heads could inherit"):
        run("push-heads", heads_folder, "user/ssd-tiny")
    assert fake_hub.writes() == []
    run("push-heads", heads_folder, "user/ssd-tiny", "--license", "apache-2.0")
    card = fake_hub.repositories["user/ssd-tiny"].files()["README.md"].decode()
    assert ModelCard(card).data.license == "apache-2.0"
    assert "apache-2.0, chosen by who published these heads. user/tiny states no licence." in card


def test_a_backbone_that_is_not_on_the_hub_is_refused(fake_hub: FakeHub, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "heads", "user/elsewhere")
    with pytest.raises(OSError, match="There is no repository user/elsewhere on the Hub"):
        run("push-heads", folder, "user/ssd-tiny")
    assert fake_hub.writes() == []


# --- whole pipelines --------------------------------------------------------------------------------------------------


def test_a_pushed_pipeline_loads_again_and_can_be_named_by_heads(fake_hub: FakeHub, tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    url = pipe.push_to_hub("user/whole", license="mit", commit_message="All of it")
    repository = fake_hub.repositories["user/whole"]
    assert url == f"{fake_hub.endpoint}/user/whole/commit/{repository.resolve('main')}"
    assert repository.messages[-1] == "All of it"
    data = check_card(repository.files()["README.md"].decode(), repository.files())
    assert "base_model" not in data, "the backbone came from nowhere on the Hub"
    assert json.loads(repository.files()["heads/config.json"])["base_model"] == "user/whole"
    again = SpatialSpeculativePipeline.from_pretrained("user/whole")
    draw = {"generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    codes = again(PROMPT, **draw).codes
    draw["generator"].manual_seed(0)
    assert torch.equal(codes, pipe(PROMPT, **draw).codes)


def test_a_pipeline_of_a_known_backbone_names_it_and_inherits_its_licence(fake_hub: FakeHub) -> None:
    pipe = SpatialSpeculativePipeline.from_pretrained("user/tiny", heads=tiny_heads(tiny_janus()))
    pipe.push_to_hub("user/whole", private=True, create_pr=True)
    repository = fake_hub.repositories["user/whole"]
    assert repository.private
    card = repository.files("refs/pr/1")["README.md"].decode()
    data = ModelCard(card).data
    assert (data.base_model, data.license) == ("user/tiny", "mit")


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["heads", "pipeline"])
def test_the_rendered_examples_are_what_the_templates_give_for_the_bundled_model(kind: str) -> None:
    folder = EXAMPLES[kind]
    for name, text in render_example(kind).items():
        assert text == (folder / name).read_text(), (
            "render it again: PYTHONPATH=tests python tests/publishing/test_push.py"
        )
    files = [path for path in folder.rglob("*") if path.is_file()]
    check_files({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    assert metadata_load(folder / "README.md")["license"] == "apache-2.0"


EXAMPLES = {kind: bundled_folder("hub_cards") / f"example_{kind}" for kind in ("heads", "pipeline")}


def render_example(kind: str) -> dict[str, str]:
    """Text files of an example repository by their names."""
    from ssd_pipelines.scenes import CHECKPOINT

    terms = LicenseTerms("apache-2.0", "apache-2.0, that of ssd-pipelines, which carries the embedded model.")
    if kind == "pipeline":
        pipe = SpatialSpeculativePipeline.from_pretrained(CHECKPOINT)
        card = pipeline_card("user/scenes", None, terms, "a ring above a cross", **pipeline_facts(pipe))
        return {"README.md": str(card)}
    folder = EXAMPLES[kind]
    config = json.loads((CHECKPOINT / "heads" / "config.json").read_text()) | {"base_model": "user/scenes"}
    verifier = json.loads((CHECKPOINT / "verifier" / "verifier_config.json").read_text())
    figures = Figures.read(folder / "figures.json", json.loads((folder / "figures.json").read_text())["conditions"])
    prompt = read_settings(folder / "images" / "0.gif")["prompt"]
    card = heads_card(config, verifier, "user/ssd-scenes", terms, figures, [(prompt, "images/0.gif")], prompt)
    return {"README.md": str(card), "notebook.ipynb": heads_notebook("user/ssd-scenes", "user/scenes", prompt)}


@pytest.mark.parametrize("metadata", ["license: mit\n1: 2", "license: mit\nlicense: [", "- mit", ""])
def test_metadata_that_can_t_be_read_back_are_refused(metadata: str) -> None:
    with pytest.raises(ValueError, match="metadata"):
        check_metadata(f"---\n{metadata}\n---\n# x")


def test_every_package_is_in_the_wheel() -> None:
    import tomllib

    root = Path(cli.__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("installed, not a checkout")
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(root).parts) for path in (root / "ssd_pipelines").rglob("__init__.py")}
    assert set(listed) - {"ssd_pipelines.hub_cards"} == there


if __name__ == "__main__":
    for each, target in EXAMPLES.items():
        for file, rendered in render_example(each).items():
            (target / file).write_text(rendered)
