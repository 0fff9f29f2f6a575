"""Draft heads by name on one pipeline, and the verifier settings that come with them."""

import json
from pathlib import Path

import pytest
import torch

from ssd_pipelines import (
    AutoregressiveVerifier,
    JacobiVerifier,
    SpatialDraftHeads,
    SpatialDraftVerifier,
    SpatialSpeculativePipeline,
)
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_tokenizer


PROMPT = "a photo of a red circle"


def plain_pipeline(**components) -> SpatialSpeculativePipeline:
    pipe = SpatialSpeculativePipeline(tiny_janus(), tiny_tokenizer(), **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: SpatialSpeculativePipeline) -> torch.Tensor:
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="latent").codes


def write_heads(folder: Path, seed: int, verifier: SpatialDraftVerifier | None = None) -> Path:
    tiny_heads(tiny_janus(), seed=seed).save_pretrained(folder)
    if verifier is not None:
        verifier.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that were tuned for one round."""
    return write_heads(tmp_path_factory.mktemp("fast"), 1, SpatialDraftVerifier(rounds=1, coupling="residual"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other heads, tuned for none."""
    return write_heads(tmp_path_factory.mktemp("raw"), 2, SpatialDraftVerifier(rounds=0))


@pytest.fixture(scope="module")
def untuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tmp_path_factory.mktemp("untuned"), 3)


# --- several sets -----------------------------------------------------------------------------------------------------


def test_each_name_decodes_as_it_does_alone(fast: Path, raw: Path) -> None:
    alone = {}
    for name, folder in (("fast", fast), ("raw", raw)):
        pipe = plain_pipeline()
        pipe.load_ssd_heads(folder)
        alone[name] = draw(pipe)
    assert not torch.equal(alone["fast"], alone["raw"])

    pipe = plain_pipeline()
    pipe.load_ssd_heads(fast, adapter_name="fast")
    pipe.load_ssd_heads(raw, adapter_name="raw")
    assert pipe.list_ssd_heads() == ["fast", "raw"]
    assert pipe.get_active_ssd_heads() == "raw"
    for name in ("raw", "fast", "raw"):
        pipe.set_ssd_heads(name)
        assert torch.equal(draw(pipe), alone[name]), name


def test_heads_without_a_name_take_each_other_s_place(fast: Path, raw: Path) -> None:
    pipe = plain_pipeline(heads=tiny_heads(tiny_janus()))
    assert pipe.list_ssd_heads() == ["default"], "heads given as a component have a name too"
    pipe.load_ssd_heads(fast)
    pipe.load_ssd_heads(raw)
    assert pipe.list_ssd_heads() == ["default"]
    pipe.heads = tiny_heads(pipe.backbone, seed=9)
    assert pipe.list_ssd_heads() == ["default"]
    assert pipe.get_active_ssd_heads() == "default"


def test_a_name_that_is_taken_or_unknown_is_refused_and_nothing_changes(fast: Path, raw: Path) -> None:
    pipe = plain_pipeline()
    pipe.load_ssd_heads(fast, adapter_name="fast")
    heads, verifier = pipe.heads, pipe.verifier
    with pytest.raises(ValueError, match="already has draft heads named 'fast'"):
        pipe.load_ssd_heads(raw, adapter_name="fast")
    for call in (pipe.set_ssd_heads, pipe.delete_ssd_heads, lambda name: pipe.save_ssd_heads("nowhere", name)):
        with pytest.raises(ValueError, match="no draft heads named slow: it has fast"):
            call("slow")
    with pytest.raises(ValueError, match="named slow"):
        pipe.delete_ssd_heads(["fast", "slow"])
    assert (pipe.heads, pipe.verifier, pipe.list_ssd_heads()) == (heads, verifier, ["fast"])


def test_deleting_the_active_heads_leaves_autoregressive_decoding(fast: Path, raw: Path) -> None:
    pipe = plain_pipeline()
    autoregressive = draw(pipe)
    pipe.load_ssd_heads(fast, adapter_name="fast")
    pipe.load_ssd_heads(raw, adapter_name="raw")
    pipe.delete_ssd_heads("fast")
    assert pipe.get_active_ssd_heads() == "raw"
    pipe.delete_ssd_heads("raw")
    assert (pipe.heads, pipe.list_ssd_heads(), pipe.get_active_ssd_heads()) == (None, [], None)
    assert torch.equal(draw(pipe), autoregressive)


def test_the_active_heads_are_the_ones_that_are_saved(fast: Path, raw: Path, tmp_path: Path) -> None:
    pipe = plain_pipeline()
    pipe.load_ssd_heads(fast, adapter_name="fast")
    pipe.load_ssd_heads(raw, adapter_name="raw")
    pipe.set_ssd_heads("fast")
    drawn = draw(pipe)
    pipe.save_pretrained(tmp_path / "pipeline")
    again = SpatialSpeculativePipeline.from_pretrained(tmp_path / "pipeline")
    assert torch.equal(draw(again), drawn)
    again.load_ssd_heads(raw, adapter_name="raw")
    assert again.verifier.config.rounds == 0
    again.unload_ssd_heads()
    assert again.verifier.config.rounds == 1, "the saved verifier comes back"

    pipe.save_ssd_heads(tmp_path / "raw", "raw")
    settings = json.loads((tmp_path / "raw" / "verifier_config.json").read_text())
    assert settings["rounds"] == 0, "an inactive set is saved with its own settings"
    other = plain_pipeline()
    other.load_ssd_heads(tmp_path / "raw")
    pipe.set_ssd_heads("raw")
    assert torch.equal(draw(other), draw(pipe))


def test_from_pipe_knows_the_heads_that_the_other_has_loaded(fast: Path, raw: Path) -> None:
    pipe = plain_pipeline()
    plain = pipe.verifier
    pipe.load_ssd_heads(fast, adapter_name="fast")
    pipe.load_ssd_heads(raw, adapter_name="raw")
    other = SpatialSpeculativePipeline.from_pipe(pipe)
    other.set_ssd_heads("fast")
    assert other.verifier.config.rounds == 1
    assert pipe.get_active_ssd_heads() == "raw"
    other.unload_ssd_heads()
    assert other.verifier is plain
    assert pipe.list_ssd_heads() == ["fast", "raw"]


# --- the settings tuned for them --------------------------------------------------------------------------------------


def test_heads_bring_their_verifier_and_take_it_along(fast: Path, untuned: Path) -> None:
    pipe = plain_pipeline()
    plain, autoregressive = pipe.verifier, draw(pipe)
    pipe.load_ssd_heads(fast, adapter_name="fast")
    assert (pipe.verifier.config.rounds, pipe.verifier.config.coupling) == (1, "residual")
    pipe.load_ssd_heads(untuned, adapter_name="untuned")
    assert pipe.verifier is plain
    pipe.set_ssd_heads("fast")
    pipe.unload_ssd_heads()
    assert pipe.verifier is plain
    assert torch.equal(draw(pipe), autoregressive)


@pytest.mark.parametrize("when", ["given", "assigned before", "assigned after"])
def test_a_verifier_that_the_user_chose_is_never_replaced(when: str, fast: Path, raw: Path) -> None:
    mine = SpatialDraftVerifier(rounds=3)
    pipe = plain_pipeline(**({"verifier": mine} if when == "given" else {}))
    if when == "assigned before":
        pipe.verifier = mine
    pipe.load_ssd_heads(fast, adapter_name="fast")
    if when == "assigned after":
        pipe.verifier = mine
    pipe.load_ssd_heads(raw, adapter_name="raw")
    assert pipe.verifier is mine
    pipe.set_ssd_heads("fast")
    pipe.unload_ssd_heads()
    assert pipe.verifier is mine


def test_a_verifier_passed_to_from_pretrained_wins_over_the_heads_own(fast: Path, tmp_path: Path) -> None:
    plain_pipeline().save_pretrained(tmp_path)
    load = SpatialSpeculativePipeline.from_pretrained
    assert load(tmp_path, heads=fast).verifier.config.rounds == 1
    mine = AutoregressiveVerifier()
    pipe = load(tmp_path, heads=fast, verifier=mine)
    assert pipe.verifier is mine
    pipe.unload_ssd_heads()
    assert pipe.verifier is mine


def test_sampling_that_the_heads_leave_open_stays_as_it_was(fast: Path, tmp_path: Path) -> None:
    plain_pipeline(verifier=SpatialDraftVerifier(top_p=0.9, temperature=0.8)).save_pretrained(tmp_path / "pipeline")
    pipe = SpatialSpeculativePipeline.from_pretrained(tmp_path / "pipeline")
    cool = write_heads(tmp_path / "cool", 4, SpatialDraftVerifier(rounds=2, temperature=0.5))
    pipe.load_ssd_heads(cool)
    config = pipe.verifier.config
    assert (config.rounds, config.top_p, config.temperature) == (2, 0.9, 0.5)


def test_the_settings_that_are_saved_are_those_that_were_decoded_with(fast: Path, tmp_path: Path) -> None:
    pipe = plain_pipeline()
    pipe.load_ssd_heads(fast)
    pipe.verifier = SpatialDraftVerifier.from_config(pipe.verifier.config, rounds=4)
    pipe.save_ssd_heads(tmp_path)
    assert json.loads((tmp_path / "verifier_config.json").read_text())["rounds"] == 4
    pipe.verifier = JacobiVerifier()
    pipe.save_ssd_heads(tmp_path)
    assert json.loads((tmp_path / "verifier_config.json").read_text())["rounds"] == 1, "Jacobi drafts without heads"
    pipe.load_ssd_heads(tiny_heads(pipe.backbone))
    pipe.save_ssd_heads(tmp_path)
    assert not (tmp_path / "verifier_config.json").exists(), "settings of other heads would stay beside them"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_class_name": "os.system"}, "is of class 'os.system', this release knows AutoregressiveVerifier"),
        ({"_class_name": "SpatialDraftVerifier", "rounds": -1}, "can't be used: `rounds` must be"),
        ({"_class_name": "SpatialDraftVerifier", "block_size": 7}, "draft heads have 2 vertical offsets"),
    ],
)
def test_settings_that_can_t_be_used_leave_the_pipeline_as_it_was(
    settings: dict, message: str, fast: Path, tmp_path: Path
) -> None:
    folder = write_heads(tmp_path, 5)
    (folder / "verifier_config.json").write_text(json.dumps(settings))
    pipe = plain_pipeline()
    pipe.load_ssd_heads(fast)
    before = pipe.heads, pipe.verifier, pipe.list_ssd_heads()
    with pytest.raises(ValueError, match=message):
        pipe.load_ssd_heads(folder, adapter_name="broken")
    assert (pipe.heads, pipe.verifier, pipe.list_ssd_heads()) == before


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["none", "model", "layerwise casting"])
def test_loading_switching_and_unloading_leave_every_hook_of_the_backbone(offload: str, fast: Path, raw: Path) -> None:
    pipe = plain_pipeline()
    if offload == "model":
        pipe.enable_model_cpu_offload(device="cpu")

    def traces() -> list:
        return [
            (name, id(getattr(module, "_hf_hook", None)), len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in pipe.backbone.named_modules()
        ]

    before, autoregressive = traces(), draw(plain_pipeline())
    pipe.load_ssd_heads(fast, adapter_name="fast")
    if offload == "layerwise casting":
        pipe.heads.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        cast = draw(pipe)
    pipe.load_ssd_heads(raw, adapter_name="raw")
    pipe.set_ssd_heads("fast")
    if offload == "layerwise casting":
        assert pipe.heads.horizontal[0].w0.weight.dtype == torch.float8_e4m3fn, "switching keeps what was cast"
        assert torch.equal(draw(pipe), cast)
    pipe.unload_ssd_heads()
    assert traces() == before
    assert torch.equal(draw(pipe), autoregressive)


def test_something_else_than_heads_is_refused_by_name(tmp_path: Path) -> None:
    tiny_janus().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds JanusForConditionalGeneration, not draft heads"):
        SpatialDraftHeads.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not draft heads"):
        plain_pipeline().load_ssd_heads(tmp_path)
