"""Loading from the Hub, against a small one on localhost: no function of `huggingface_hub` is replaced."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import READER, TOKEN, FakeHub

from ssd_pipelines import SpatialDraftHeads, SpatialDraftVerifier, SpatialSpeculativePipeline, hub
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_pipeline, tiny_tokenizer


PROMPT = "a photo of a red circle"


def load(source: Any, **kwargs: Any) -> SpatialSpeculativePipeline:
    pipe = SpatialSpeculativePipeline.from_pretrained(source, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: SpatialSpeculativePipeline) -> torch.Tensor:
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="latent").codes


def write_heads(folder: Path, seed: int = 0, base_model: str | None = "user/tiny", **config: Any) -> Path:
    heads = tiny_heads(tiny_janus(), seed=seed)
    heads.register_to_config(base_model=base_model, **config)
    heads.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, draft heads, and a saved pipeline, each in its folder."""
    folder = tmp_path_factory.mktemp("folders")
    tiny_janus().save_pretrained(folder / "backbone")
    tiny_tokenizer().save_pretrained(folder / "backbone")
    tiny_janus(seed=1).save_pretrained(folder / "newer")
    tiny_tokenizer().save_pretrained(folder / "newer")
    write_heads(folder / "heads")
    SpatialDraftVerifier(rounds=1).save_pretrained(folder / "heads")
    tiny_pipeline().save_pretrained(folder / "pipeline")
    return folder


@pytest.fixture
def fake_hub(tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub().reachable() as fake:
        fake.point_here(monkeypatch, tmp_path / "cache")
        fake.add("user/tiny", folders / "backbone")
        fake.add("user/ssd-tiny", folders / "heads")
        fake.add("user/pipeline", folders / "pipeline")
        yield fake


# --- what loads -------------------------------------------------------------------------------------------------------


def test_a_backbone_and_heads_load_from_two_repositories(fake_hub: FakeHub) -> None:
    pipe = load("user/tiny", heads="user/ssd-tiny")
    assert pipe.verifier.config.rounds == 1, "the settings tuned for the heads"
    assert torch.equal(draw(pipe), draw(load("user/ssd-tiny"))), "heads alone name their backbone"
    assert pipe.backbone.config.name_or_path == "user/tiny"


def test_a_saved_pipeline_loads_without_pickles_and_without_code(fake_hub: FakeHub) -> None:
    poison = b"raise SystemExit('never to be read')"
    names = ["pipeline.py", "heads/ssd_pipelines.py", "backbone/pytorch_model.bin", "heads/x.pt", "y.pkl", "z.ckpt"]
    fake_hub.repositories["user/pipeline"].commit(dict.fromkeys(names, poison))
    assert torch.equal(draw(load("user/pipeline")), draw(tiny_pipeline()))
    assert {Path(name).suffix for name in fake_hub.fetched()} == {".json", ".safetensors"}


def test_a_variant_that_only_the_backbone_has_loads_with_the_plain_heads(fake_hub: FakeHub, tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "mixed", variant="fp16")
    shutil.rmtree(tmp_path / "mixed" / "heads")
    tiny_pipeline().heads.save_pretrained(tmp_path / "mixed" / "heads")
    fake_hub.add("user/mixed", tmp_path / "mixed")
    assert torch.equal(draw(load("user/mixed", variant="fp16")), draw(tiny_pipeline()))
    weights = {name for name in fake_hub.fetched() if name.endswith(".safetensors")}
    assert weights == {"backbone/model.fp16.safetensors", "heads/diffusion_pytorch_model.safetensors"}


def test_heads_that_name_a_saved_pipeline_load_with_its_backbone(fake_hub: FakeHub, tmp_path: Path) -> None:
    pipe = load("user/pipeline")
    named = SpatialDraftHeads.for_backbone(pipe.adapter(), num_horizontal=1).config
    sha = fake_hub.repositories["user/pipeline"].resolve("main")
    assert (named.base_model, named.base_model_revision) == ("user/pipeline", sha), "not a folder of the cache"
    fake_hub.add("user/other-heads", write_heads(tmp_path, seed=1, base_model="user/pipeline"))
    again = load("user/other-heads")
    assert again.heads.config.base_model == "user/pipeline"
    assert torch.equal(again.backbone.lm_head.weight, pipe.backbone.lm_head.weight)


def test_backbone_and_heads_have_revisions_of_their_own(fake_hub: FakeHub, folders: Path, tmp_path: Path) -> None:
    tiny = fake_hub.repositories["user/tiny"]
    old = tiny.resolve("main")
    files = {p.name: p.read_bytes() for p in (folders / "newer").iterdir()}
    tiny.commit(files)
    trained_on_old = write_heads(tmp_path / "v2", seed=2, base_model_revision=old)
    heads = fake_hub.repositories["user/ssd-tiny"]
    heads.branches["v2"] = heads.branches["main"]
    heads.commit({p.name: p.read_bytes() for p in trained_on_old.iterdir()}, "v2")

    def weights(pipe: SpatialSpeculativePipeline) -> tuple[torch.Tensor, torch.Tensor]:
        return pipe.backbone.lm_head.weight, pipe.heads.horizontal[0].w0.weight

    old_backbone, new_backbone = tiny_janus().lm_head.weight, tiny_janus(seed=1).lm_head.weight
    first, second = (tiny_heads(tiny_janus(), seed=seed).horizontal[0].w0.weight for seed in (0, 2))
    for arguments, expected in [
        ({"pretrained_model_name_or_path": "user/tiny", "heads": "user/ssd-tiny"}, (new_backbone, first)),
        (
            {"pretrained_model_name_or_path": "user/tiny", "revision": old, "heads": "user/ssd-tiny",
             "heads_revision": "v2"},
            (old_backbone, second),
        ),
        ({"pretrained_model_name_or_path": "user/ssd-tiny"}, (new_backbone, first)),
        ({"pretrained_model_name_or_path": "user/ssd-tiny", "revision": "v2"}, (old_backbone, second)),
    ]:  # fmt: skip
        for found, wanted in zip(
            weights(SpatialSpeculativePipeline.from_pretrained(**arguments)), expected, strict=True
        ):
            assert torch.equal(found, wanted), arguments


def test_heads_in_a_subfolder_load_by_every_loader(fake_hub: FakeHub, tmp_path: Path) -> None:
    write_heads(tmp_path / "sets" / "small", seed=3)
    fake_hub.add("user/sets", tmp_path / "sets")
    wanted = tiny_heads(tiny_janus(), seed=3).horizontal[0].w0.weight
    pipe = load("user/tiny")
    pipe.load_ssd_heads("user/sets", subfolder="small")
    for found in (pipe, load("user/tiny", heads="user/sets", heads_subfolder="small"),
                  load("user/sets", subfolder="small"), load(tmp_path / "sets", subfolder="small")):  # fmt: skip
        assert torch.equal(found.heads.horizontal[0].w0.weight, wanted)
    with pytest.raises(OSError, match="user/sets in its folder big has no config.json"):
        pipe.load_ssd_heads("user/sets", subfolder="big")


def test_a_private_repository_loads_with_the_token_alone(fake_hub: FakeHub) -> None:
    fake_hub.repositories["user/tiny"].private = fake_hub.repositories["user/ssd-tiny"].private = True
    with pytest.raises(OSError, match="There is no repository user/ssd-tiny on the Hub, or it is private"):
        load("user/ssd-tiny")
    assert load("user/ssd-tiny", token=TOKEN).heads is not None


# --- what is refused, each in one sentence ----------------------------------------------------------------------------


def _pipeline(source: str, **kwargs: Any) -> Any:
    return load(source, **kwargs)


def _onto_a_pipeline(source: str, **kwargs: Any) -> Any:
    pipe = tiny_pipeline()
    before = pipe.heads, pipe.verifier
    try:
        pipe.load_ssd_heads(source, **kwargs)
    finally:
        assert (pipe.heads, pipe.verifier) == before


def _heads(source: str, **kwargs: Any) -> Any:
    return SpatialDraftHeads.from_pretrained(source, **kwargs)


def _beside_a_backbone(source: str, **kwargs: Any) -> Any:
    revision = kwargs.pop("revision", None)
    return load("user/tiny", heads=source, heads_revision=revision, **kwargs)


every_loader = pytest.mark.parametrize(
    "loader", [_pipeline, _onto_a_pipeline, _heads, _beside_a_backbone], ids=lambda f: f.__name__.strip("_")
)


@every_loader
@pytest.mark.parametrize(
    ("source", "kwargs", "sentence"),
    [
        ("user/missing", {}, "There is no repository user/missing on the Hub, or it is private: check the name"),
        ("user/gated", {}, "user/gated is gated: accept its conditions at http.*/user/gated"),
        ("user/gated", {"token": READER}, "user/gated is gated: accept its conditions"),
        ("user/ssd-tiny", {"revision": "v9"}, "user/ssd-tiny has no revision 'v9': give a branch, a tag or"),
        ("user/a/b/c", {}, "user/a/b/c is neither a folder here nor the name of a Hub repository"),
        ("user/ssd-tiny", {"local_files_only": True}, "is not a local folder, and .* in the cache, where `local_files"),
    ],
    ids=["missing", "gated", "gated, with a token", "revision", "no name", "not in the cache"],
)
def test_what_the_hub_refuses_is_said_in_one_sentence(
    fake_hub: FakeHub, folders: Path, loader: Any, source: str, kwargs: dict[str, Any], sentence: str
) -> None:
    fake_hub.add("user/gated", folders / "heads", gated=True)
    if loader is _beside_a_backbone and kwargs.get("local_files_only"):
        load("user/tiny")  # which is then in the cache
    with pytest.raises((OSError, ValueError), match=sentence) as error:
        loader(source, **kwargs)
    assert str(error.value).count("\n") == 0
    assert "https://" not in str(error.value).replace(fake_hub.endpoint, "")


@every_loader
def test_a_wrong_token_is_said_to_be_wrong(fake_hub: FakeHub, loader: Any) -> None:
    with pytest.raises(OSError, match="The Hub did not accept the token for user/(ssd-)?tiny: log in again") as error:
        loader("user/ssd-tiny", token="hf_wrong")
    assert "hf_wrong" not in str(error.value)


@pytest.mark.slow  # the libraries try again for a while
def test_no_connection_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub()
    fake.endpoint = "http://127.0.0.1:9"
    fake.point_here(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="user/tiny is not a local folder, and the Hub can't be reached"):
        load("user/tiny")


def test_what_was_loaded_once_loads_again_offline(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {source: draw(load(source)) for source in ("user/ssd-tiny", "user/pipeline")}
    asked = len(fake_hub.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source, codes in drawn.items():
        assert torch.equal(draw(load(source)), codes)
        assert torch.equal(draw(load(source, local_files_only=True)), codes)
    assert len(fake_hub.requests) == asked


def test_a_pipeline_that_is_half_in_the_cache_is_not_loaded_offline(fake_hub: FakeHub) -> None:
    hub.read_json("user/pipeline", "model_index.json")
    with pytest.raises(OSError, match="user/pipeline is not a local folder, and not every file of it is in the cache"):
        load("user/pipeline", local_files_only=True)


@pytest.mark.parametrize("base_model", ["/home/me/janus", "./janus", "C:\\models\\janus", None])
def test_heads_on_the_hub_that_name_a_path_don_t_make_it_load(
    fake_hub: FakeHub, tmp_path: Path, base_model: str | None
) -> None:
    fake_hub.add("user/careless", write_heads(tmp_path, base_model=base_model))
    message = "don't name their backbone" if base_model is None else "which is a path on this machine, not a repository"
    with pytest.raises(ValueError, match=message):
        load("user/careless")
    assert load("user/tiny", heads="user/careless").heads is not None


def test_heads_that_name_heads_are_refused(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.add("user/circle", write_heads(tmp_path, base_model="user/ssd-tiny"))
    with pytest.raises(ValueError, match="name user/ssd-tiny as their backbone, which holds draft heads too"):
        load("user/circle")


# --- plain Diffusers --------------------------------------------------------------------------------------------------

SHIM_PROGRAM = """
import json, sys, torch
from diffusers import DiffusionPipeline

report = {}
for source in sys.argv[2:]:
    for trust in (False, True):
        try:
            pipe = DiffusionPipeline.from_pretrained(source, trust_remote_code=trust)
            pipe.set_progress_bar_config(disable=True)
            codes = pipe(sys.argv[1], generator=torch.Generator().manual_seed(0), output_type="latent").codes
            report[f"{source} {trust}"] = {"codes": codes.tolist(), "class": type(pipe).__module__}
        except Exception as error:
            report[f"{source} {trust}"] = {"error": repr(error)}
print(json.dumps(report))
"""


@pytest.mark.slow
def test_with_the_shim_plain_diffusers_loads_a_folder_and_a_repository(tmp_path: Path, folders: Path) -> None:
    folder = tmp_path / "shim"
    pipe = tiny_pipeline()
    pipe.save_pretrained(folder, with_remote_code_shim=True)
    with FakeHub().reachable() as fake:
        fake.add("user/shim", folder)
        environment = {**os.environ, **fake.environment(tmp_path / "home")}
        command = [sys.executable, "-c", SHIM_PROGRAM, PROMPT, str(folder), "user/shim"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    for source in (str(folder), "user/shim"):
        assert "error" in report[f"{source} False"], "without trust nothing of a folder is run"
        assert report[f"{source} True"].get("codes") == draw(pipe).tolist(), report[f"{source} True"]
        assert report[f"{source} True"]["class"] == "ssd_pipelines"


def test_our_own_loader_never_runs_the_shim(tmp_path: Path, fake_hub: FakeHub) -> None:
    pipe = tiny_pipeline()
    pipe.save_pretrained(tmp_path / "shim", with_remote_code_shim=True)
    canary = tmp_path / "canary"
    for path in (tmp_path / "shim").rglob("*.py"):
        path.write_text(f"open({str(canary)!r}, 'w').write('sung')\n" + path.read_text())
    fake_hub.add("user/shim", tmp_path / "shim")
    for source in (tmp_path / "shim", "user/shim"):
        assert torch.equal(draw(load(source)), draw(pipe))
    assert not canary.exists()
    assert not [name for name in fake_hub.fetched() if name.endswith(".py")]


def test_a_pipeline_is_never_saved_as_pickles(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`safe_serialization=False` would write pickles"):
        tiny_pipeline().save_pretrained(tmp_path, safe_serialization=False)
    assert list(tmp_path.iterdir()) == []
