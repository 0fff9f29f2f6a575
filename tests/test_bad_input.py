"""Wrong input gets one sentence that says what was given and what is allowed; odd but sensible input works."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_pipelines import (
    AutoregressiveVerifier,
    SpatialDraftHeads,
    SpatialDraftVerifier,
    SpatialSpeculativePipeline,
    Verifier,
)
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_pipeline, tiny_tokenizer


PROMPT = "a red circle"
PROMPTS = [PROMPT, "a blue square"]
SIDE, VOCABULARY = 4, 64
TENSOR = "horizontal.2.w0.weight"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(pipe: SpatialSpeculativePipeline, prompt: Any = PROMPT, **kwargs: Any) -> torch.Tensor:
    """Codes of a call with seed 0, unless said otherwise."""
    return pipe(prompt, **{"generator": seeded(), "output_type": "latent", **kwargs}).codes


@contextmanager
def counted_passes(pipe: SpatialSpeculativePipeline) -> Iterator[list[int]]:
    """Within it, a list that grows with every pass of the decoder."""
    passes: list[int] = []
    handle = pipe.backbone.model.language_model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def pipe() -> SpatialSpeculativePipeline:
    """Shared: a refused call must leave nothing behind, so the tests need no fresh one."""
    return tiny_pipeline()


@pytest.fixture(scope="module")
def base_codes() -> torch.Tensor:
    return draw(tiny_pipeline())


# --- calls that are refused -------------------------------------------------------------------------------------------

REFUSED_CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    # Guidance
    ("guidance -1", {"guidance_scale": -1}, ["`guidance_scale`", "-1", "0"]),
    ("guidance nan", {"guidance_scale": math.nan}, ["`guidance_scale`", "nan"]),
    ("guidance inf", {"guidance_scale": math.inf}, ["`guidance_scale`", "inf"]),
    ("guidance text", {"guidance_scale": "5"}, ["`guidance_scale`", "'5'"]),
    ("too many negatives", {"negative_prompt": ["a", "b"]}, ["`negative_prompt`", "1", "['a', 'b']"]),
    ("too few negatives", {"prompt": PROMPTS, "negative_prompt": ["a"]}, ["`negative_prompt`", "2", "['a']"]),
    ("no negatives", {"negative_prompt": []}, ["`negative_prompt`", "[]"]),
    ("negative number", {"negative_prompt": 5}, ["`negative_prompt`", "5"]),
    ("negative of numbers", {"negative_prompt": [5]}, ["`negative_prompt`", "[5]"]),
    # Sampling
    ("top_k -1", {"top_k": -1}, ["`top_k`", "-1", "0 (keep all"]),
    ("top_k 1.5", {"top_k": 1.5}, ["`top_k`", "1.5", "whole number"]),
    ("top_k nan", {"top_k": math.nan}, ["`top_k`", "nan", "whole number"]),
    ("top_k text", {"top_k": "5"}, ["`top_k`", "5", "whole number"]),
    ("top_p 0", {"top_p": 0}, ["`top_p`", "(0, 1]", "got 0"]),
    ("top_p 1.1", {"top_p": 1.1}, ["`top_p`", "(0, 1]", "1.1"]),
    ("top_p -0.1", {"top_p": -0.1}, ["`top_p`", "(0, 1]", "-0.1"]),
    ("top_p nan", {"top_p": math.nan}, ["`top_p`", "(0, 1]", "nan"]),
    ("top_p text", {"top_p": "0.5"}, ["`top_p`", "(0, 1]", "0.5"]),
    ("temperature -1", {"temperature": -1}, ["`temperature`", "-1", "0 (argmax) or positive"]),
    ("temperature nan", {"temperature": math.nan}, ["`temperature`", "nan"]),
    ("temperature text", {"temperature": "1"}, ["`temperature`", "1"]),
    # Sizes
    ("height 383", {"height": 383}, ["`height`", "383", "16 x 16"]),
    ("height 0", {"height": 0}, ["`height`", "0", "16 x 16"]),
    ("width -16", {"width": -16}, ["`width`", "-16", "16 x 16"]),
    ("height text", {"height": "384"}, ["`height`", "'384'", "16 x 16"]),
    ("one side right", {"height": 16, "width": 32}, ["`width`", "32", "16 x 16"]),
    ("no images", {"num_images_per_prompt": 0}, ["`num_images_per_prompt`", "0", "at least 1"]),
    ("half an image", {"num_images_per_prompt": 1.5}, ["`num_images_per_prompt`", "1.5", "whole number"]),
    ("images true", {"num_images_per_prompt": True}, ["`num_images_per_prompt`", "True", "whole number"]),
    # Prompts
    ("no prompt", {"prompt": None}, ["`prompt`", "None", "string"]),
    ("empty list", {"prompt": []}, ["`prompt`", "[]", "at least one"]),
    ("number among prompts", {"prompt": [PROMPT, 5]}, ["`prompt`", "5"]),
    ("prompt too long", {"prompt": "red " * 16384}, ["16384 positions", "shorten the prompt"]),
    # Seeds
    ("generator number", {"generator": 5}, ["`generator`", "5", "torch.Generator"]),
    ("generators too many", {"generator": [seeded(), seeded()]}, ["2 generators", "1 pictures"]),
    (
        "generators a prompt, not a picture",
        {"prompt": PROMPTS, "num_images_per_prompt": 2, "generator": [seeded(), seeded()]},
        ["2 generators", "4 pictures"],
    ),
    ("no generators", {"generator": []}, ["0 generators", "1 pictures"]),
    ("generators of numbers", {"generator": [5]}, ["`generator`", "5"]),
    # Callbacks and the rest
    ("unknown tensor", {"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}, ["prompt_embeds", "latents"]),
    ("callback no function", {"callback_on_step_end": 5}, ["`callback_on_step_end`", "5"]),
    ("output_type", {"output_type": "jpg"}, ["`output_type`", '"pil"', "'jpg'"]),
    ("output_type none", {"output_type": None}, ["`output_type`", '"pil"', "None"]),
    ("latents shape", {"latents": torch.zeros(1, 4, 5, dtype=torch.long)}, ["`latents`", "(1, 4, 4)", "(1, 4, 5)"]),
    ("latents batch", {"prompt": PROMPTS, "latents": torch.zeros(1, 4, 4, dtype=torch.long)}, ["(2, 4, 4)"]),
    ("latents float", {"latents": torch.zeros(1, 4, 4)}, ["`latents`", "whole numbers", "64"]),
    ("latents too large", {"latents": torch.full((1, 4, 4), 64)}, ["`latents`", "below 64"]),
    ("latents list", {"latents": [[[0] * 4] * 4]}, ["`latents`", "list"]),
]


@pytest.mark.parametrize(
    ("arguments", "telling"), [case[1:] for case in REFUSED_CALLS], ids=[case[0] for case in REFUSED_CALLS]
)
def test_a_senseless_call_is_refused_before_any_pass(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor, arguments: dict[str, Any], telling: list[str]
) -> None:
    with counted_passes(pipe) as passes, pytest.raises(ValueError) as refusal:
        draw(pipe, **{"prompt": PROMPT, **arguments})
    message = str(refusal.value)
    assert [part for part in telling if part not in message] == [], message
    assert len(message) < 300, "one sentence, not a page"
    assert "\n" not in message
    assert not passes
    assert torch.equal(draw(pipe), base_codes), "the refused call left something behind"


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        ({"prompt": PROMPT}, "leave out `prompt`"),
        ({"negative_prompt": "x"}, "leave out `prompt`, `negative_prompt`"),
        ({"num_images_per_prompt": 2}, "repetitions"),
        ({"guidance_scale": 1.0}, "do_classifier_free_guidance=False"),
        ({"prompt_embeds": torch.zeros(1, 2, 3)}, "must be what `pipe.encode_prompt` returned, got Tensor"),
    ],
    ids=str,
)
def test_encoded_prompts_that_do_not_fit_the_call_are_refused(
    pipe: SpatialSpeculativePipeline, arguments: dict[str, Any], telling: str
) -> None:
    encoded = pipe.encode_prompt(PROMPT)
    with counted_passes(pipe) as passes, pytest.raises(ValueError, match=re.escape(telling)):
        pipe(**{"prompt_embeds": encoded, "guidance_scale": 5.0, **arguments})
    assert not passes


@pytest.mark.gpu
def test_a_cuda_generator_with_a_cpu_model_is_refused(pipe: SpatialSpeculativePipeline) -> None:
    with pytest.raises(ValueError, match="use a CPU generator"):
        draw(pipe, generator=torch.Generator("cuda"))


def test_a_backbone_in_training_mode_is_refused() -> None:
    pipe = tiny_pipeline()
    pipe.backbone.train()
    with pytest.raises(ValueError, match="training mode.*eval"):
        draw(pipe)


# --- calls that work --------------------------------------------------------------------------------------------------

SENSIBLE_CALLS: list[dict[str, Any]] = [
    *({"top_k": k} for k in (None, 0, 1, VOCABULARY, VOCABULARY + 1, 10**9)),
    *({"top_p": p} for p in (None, 1e-9, 0.5, 1, 1.0)),
    *({"temperature": t} for t in (None, 0, 0.0, 1e-8, 1, 100.0)),
    *({"guidance_scale": g} for g in (None, 0, 1, 1.0001, 5, 7.5)),
    {"height": 16, "width": 16},
    {"height": 16},
    {"negative_prompt": "blue"},
    {"negative_prompt": ""},
    {"prompt": PROMPTS, "negative_prompt": "blue"},
    {"prompt": PROMPTS, "negative_prompt": ["blue", "green"]},
    {"prompt": tuple(PROMPTS)},
    {"prompt": ""},
    {"prompt": "unknownword ünïcödé 你好"},
    {"generator": None},
    {"prompt": PROMPTS, "num_images_per_prompt": 2, "generator": [seeded(k) for k in range(4)]},
    {"latents": torch.full((1, 4, 4), -1)},
    {"callback_on_step_end_tensor_inputs": []},
    {"callback_on_step_end_tensor_inputs": None},
    {"callback_on_step_end": lambda *_: None},
    {"callback_on_step_end": lambda *_: {}},
]


def shortly(arguments: dict[str, Any]) -> str:
    return " ".join(f"{name}={value!s:.24}" for name, value in arguments.items())


@pytest.mark.parametrize("arguments", SENSIBLE_CALLS, ids=shortly)
@pytest.mark.parametrize("verifier", [AutoregressiveVerifier(), SpatialDraftVerifier()], ids=["plain", "drafts"])
def test_a_sensible_call_draws_a_whole_picture(
    pipe: SpatialSpeculativePipeline, verifier: Verifier, arguments: dict[str, Any]
) -> None:
    before = pipe.verifier
    pipe.verifier = verifier
    try:
        codes = draw(pipe, **{"prompt": PROMPT, **arguments})
    finally:
        pipe.verifier = before
    assert codes.shape[1:] == (SIDE, SIDE)
    assert codes.min() >= 0
    assert codes.max() < VOCABULARY


def equal_settings() -> dict[str, list[dict[str, Any]]]:
    return {
        "all codes kept": [{}, {"top_k": 0}, {"top_k": VOCABULARY}, {"top_k": VOCABULARY + 1}, {"top_k": 10**9}],
        "all mass kept": [{}, {"top_p": 1}, {"top_p": 1.0}],
        "argmax": [{"temperature": 0}, {"temperature": 1e-8}, {"top_k": 1}, {"top_p": 1e-9}],
        "no guidance": [{"guidance_scale": 1}, {"guidance_scale": 0}, {"guidance_scale": 0.5}],
        "the recommended": [{}, {"guidance_scale": 5.0}, {"guidance_scale": None}, {"temperature": 1.0}],
    }


@pytest.mark.parametrize("name", list(equal_settings()))
@pytest.mark.parametrize("verifier", [AutoregressiveVerifier(), SpatialDraftVerifier()], ids=["plain", "drafts"])
def test_settings_that_mean_the_same_draw_the_same(verifier: Verifier, name: str) -> None:
    pipe = tiny_pipeline(verifier=verifier)
    first, *others = [draw(pipe, **settings) for settings in equal_settings()[name]]
    for codes in others:
        assert torch.equal(codes, first)


def test_a_temperature_of_zero_needs_no_seed() -> None:
    for verifier in (AutoregressiveVerifier(), SpatialDraftVerifier(), SpatialDraftVerifier(draft="argmax")):
        pipe = tiny_pipeline(verifier=verifier)
        assert torch.equal(
            draw(pipe, temperature=0, generator=seeded(1)), draw(pipe, temperature=0, generator=seeded(2))
        )
        assert not torch.equal(draw(pipe, generator=seeded(1)), draw(pipe, generator=seeded(2)))


def test_a_callback_may_name_its_one_tensor_without_a_list(pipe: SpatialSpeculativePipeline) -> None:
    seen: list[set[str]] = []
    try:
        draw(
            pipe,
            callback_on_step_end=lambda p, s, t, kwargs: seen.append(set(kwargs)),
            callback_on_step_end_tensor_inputs="latents",
        )
    except ValueError as refusal:  # as good, if the sentence shows what was given
        assert "'latents'" in str(refusal)
        assert "['l', 'a'" not in str(refusal)
    else:
        assert seen
        assert all(names == {"latents"} for names in seen)


# --- verifiers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "telling"),
    [
        ({"block_size": 0}, ["`block_size`", "at least 1", "0"]),
        ({"block_size": 1.5}, ["`block_size`", "whole number", "1.5"]),
        ({"block_size": True}, ["`block_size`", "whole number", "True"]),
        ({"rounds": -1}, ["`rounds`", "at least 0", "-1"]),
        ({"rounds": "2"}, ["`rounds`", "whole number", "'2'"]),
        ({"trailing_rounds": -1}, ["`trailing_rounds`", "at least 0", "-1"]),
        ({"horizontal_block": 0}, ["`horizontal_block`", "at least 1", "0"]),
        ({"horizontal_rounds": -2}, ["`horizontal_rounds`", "at least 0", "-2"]),
        ({"draft": "greedy"}, ["`draft`", '"argmax"', "'greedy'"]),
    ],
    ids=str,
)
def test_a_senseless_verifier_is_refused_when_it_is_made(settings: dict[str, Any], telling: list[str]) -> None:
    for make in (
        lambda: SpatialDraftVerifier(**settings),
        lambda: SpatialDraftVerifier.from_config(SpatialDraftVerifier().config, **settings),
    ):
        with pytest.raises(ValueError) as refusal:
            make()
        assert [part for part in telling if part not in str(refusal.value)] == [], str(refusal.value)


def test_a_setting_that_a_verifier_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(ValueError, match="has no setting rounds; it has coupling, temperature") as refusal:
        AutoregressiveVerifier.from_config(SpatialDraftVerifier().config, rounds=3)
    assert "top_k" in str(refusal.value)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_senseless_sampling_setting_of_a_verifier_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*-0.5"):
        draw(tiny_pipeline(verifier=AutoregressiveVerifier(**{name: -0.5})))


@pytest.mark.parametrize(
    ("verifier", "telling"),
    [
        (SpatialDraftVerifier(block_size=3), ["`block_size`", "3", "2 vertical"]),
        (SpatialDraftVerifier(horizontal_block=7), ["`horizontal_block`", "7", "5 horizontal"]),
    ],
    ids=["rows", "columns"],
)
def test_more_offsets_than_the_heads_have_are_refused(verifier: Verifier, telling: list[str]) -> None:
    pipe = tiny_pipeline(side=8, verifier=verifier)
    with counted_passes(pipe) as passes, pytest.raises(ValueError) as refusal:
        draw(pipe)
    assert [part for part in telling if part not in str(refusal.value)] == [], str(refusal.value)
    assert not passes


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def heads_folder(tmp_path: Path) -> Path:
    tiny_heads(tiny_janus(), seed=1).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    assert TENSOR in tensors
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


INCOMPLETE: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "missing": lambda tensors: tensors.pop(TENSOR),
    "renamed": lambda tensors: tensors.update({"other.weight": tensors.pop(TENSOR)}),
    "another shape": lambda tensors: tensors.update({TENSOR: tensors[TENSOR][:-1].clone()}),
}


@pytest.mark.parametrize("fault", list(INCOMPLETE))
def test_an_incomplete_head_file_is_refused_by_the_tensors_name(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor, heads_folder: Path, tmp_path: Path, fault: str
) -> None:
    rewrite(heads_folder, INCOMPLETE[fault])
    heads = pipe.heads
    with pytest.raises(ValueError, match=TENSOR):
        pipe.load_ssd_heads(heads_folder)
    assert pipe.heads is heads
    assert torch.equal(draw(pipe), base_codes)
    with pytest.raises(ValueError, match=TENSOR):
        SpatialDraftHeads.from_pretrained(heads_folder)

    saved = tmp_path / "pipeline"
    pipe.save_pretrained(saved)
    shutil.copytree(heads_folder, saved / "heads", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=TENSOR):
        SpatialSpeculativePipeline.from_pretrained(saved)


def test_a_superfluous_tensor_is_a_warning_by_its_name(
    pipe: SpatialSpeculativePipeline, heads_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_file(heads_folder / "diffusion_pytorch_model.safetensors")
    rewrite(heads_folder, lambda tensors: tensors.update({"superfluous.weight": torch.zeros(1)}))
    loaded = SpatialDraftHeads.from_pretrained(heads_folder)
    assert "superfluous.weight" in caplog.text
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())


def test_heads_of_a_newer_format_are_refused(heads_folder: Path) -> None:
    config = json.loads((heads_folder / "config.json").read_text())
    (heads_folder / "config.json").write_text(json.dumps({**config, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99.*upgrade ssd-pipelines"):
        SpatialDraftHeads.from_pretrained(heads_folder)


@pytest.mark.parametrize("name", ["inputs", "architecture"])
def test_an_unknown_kind_of_heads_is_refused_with_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*one of .*got 'other'"):
        SpatialDraftHeads(32, 64, 4, 4, **{name: "other"})


def test_heads_that_name_no_backbone_are_refused_as_a_pipeline(heads_folder: Path) -> None:
    with pytest.raises(ValueError, match="don't name their backbone.*`heads=`"):
        SpatialSpeculativePipeline.from_pretrained(heads_folder)


@pytest.mark.parametrize(
    ("config", "telling"),
    [
        ({"model_type": "multi_modality"}, ["deepseek-community/Janus-Pro-7B", "folder"]),
        ({"model_type": "llama"}, ["'llama'", "janus", "folder"]),
        ({}, ["None", "janus", "folder"]),
    ],
    ids=["older Janus", "another family", "no family"],
)
def test_a_model_of_another_family_is_refused_with_what_to_use(
    tmp_path: Path, config: dict[str, str], telling: list[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as refusal:
        SpatialSpeculativePipeline.from_pretrained(folder)
    assert [part for part in telling if part not in str(refusal.value)] == [], str(refusal.value)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a model_index.json .* nor a config.json"):
        SpatialSpeculativePipeline.from_pretrained(tmp_path)


def test_a_model_of_another_family_is_refused_by_the_constructor() -> None:
    class Config:
        model_type, name_or_path = "llama", "user/llama"

    class Model(torch.nn.Module):
        config = Config()

    with pytest.raises(ValueError, match="user/llama has model type 'llama'.*known are .*janus"):
        SpatialSpeculativePipeline(Model(), tiny_tokenizer())


def test_two_names_for_one_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give `dtype` alone"):
        SpatialSpeculativePipeline.from_pretrained(tmp_path, dtype=torch.float32, torch_dtype=torch.float32)
