"""What Diffusers' own pipelines promise, checked on tiny pipelines with tokens that must be equal, not close.

`ROWS` follows Diffusers' pipeline tests in their order: each of the 28 is a test here or is named with the reason why
it can't apply. Below the rows stand the promises that have no twin upstream.
"""

import inspect
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import CpuOffload, ModelHook, add_hook_to_module
from diffusers.callbacks import PipelineCallback
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import ssd_pipelines
from ssd_pipelines import (
    AutoregressiveVerifier,
    JacobiVerifier,
    SpatialDraftHeads,
    SpatialDraftVerifier,
    SpatialSpeculativePipeline,
    Verifier,
    WavefrontVerifier,
)
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_pipeline, tiny_tokenizer


PROMPT = "a red circle"
LONG_PROMPT = "a photo of a red square above a green triangle and a blue circle below the red square"
SIDE, PIXELS = 4, 16

ROWS: dict[int, str | list[str]] = {
    1: [
        "test_a_saved_pipeline_draws_the_same_codes",
        "test_saving_keeps_every_component_and_setting",
        "test_a_fresh_process_draws_the_same_codes",
    ],
    2: ["test_a_picture_has_the_announced_shape_and_range"],
    3: ["test_the_call_signature_is_that_of_a_diffusers_pipeline"],
    4: ["test_a_batch_of_unequal_prompts_gives_a_picture_each"],
    5: ["test_a_picture_of_a_batch_is_its_solo_picture"],
    6: ["test_a_tuple_holds_the_same_pictures_as_the_output_object"],
    7: ["test_components_are_those_of_the_constructor"],
    8: ["test_half_precision_on_a_gpu_draws_finite_pictures", "test_bfloat16_and_mixed_dtypes_draw_finite_pictures"],
    9: ["test_float16_on_a_gpu_survives_a_round_trip", "test_bfloat16_survives_a_round_trip"],
    10: ["test_absent_heads_survive_a_round_trip", "test_heads_can_be_left_out_on_loading"],
    11: ["test_a_pipeline_moves_to_a_gpu_and_back"],
    12: ["test_a_dtype_reaches_every_component"],
    13: ["test_num_images_per_prompt_multiplies_the_batch"],
    14: ["test_guidance_changes_the_picture_and_not_its_shape"],
    15: ["test_every_advertised_callback_tensor_can_be_asked_for", "test_latents_edited_in_the_last_step_are_drawn"],
    16: ["test_guidance_changed_in_a_callback_counts_once_a_step"],
    17: ["test_a_variant_round_trip_keeps_names_and_weights", "test_a_wrong_variant_is_refused"],
    18: ["test_encoded_prompts_draw_what_the_prompts_draw"],
    19: ["test_a_dtype_can_be_given_per_component", "test_torch_dtype_is_an_alias_with_a_warning"],
    # On a CPU the method refuses; what it does is emulated in tests/backbones/test_offload.py.
    20: ["test_sequential_offload_on_a_gpu_draws_the_same_codes"],
    21: [
        "test_model_offload_on_a_gpu_draws_the_same_codes",
        "test_model_offload_draws_the_same_codes_twice",
        "test_submodules_are_entered_under_the_models_hook",
    ],
    22: ["test_a_device_map_draws_the_same_codes"],
    23: ["test_group_offload_draws_the_same_codes"],
    24: ["test_heads_stored_in_float8_still_draft"],
    25: ["test_from_pipe_shares_components_and_draws_the_same", "test_from_pipe_keeps_the_dtype"],
    26: ["test_output_types_show_the_same_picture", "test_an_interrupted_run_resumes_from_its_codes"],
    27: ["test_heads_load_save_and_unload_like_an_adapter", "test_unloading_heads_leaves_hooks_and_weights_alone"],
    28: "not applicable: attention slicing, xformers, VAE tiling, FreeU, QKV fusion, PAB, FasterCache, TaylorSeer, "
    "MagCache, IP-Adapter and Karras sigmas belong to denoisers, and there is none here",
}


def test_every_row_of_the_table_has_a_test_or_a_reason() -> None:
    assert list(ROWS) == list(range(1, 29))
    for row, entry in ROWS.items():
        if isinstance(entry, str):
            assert entry.startswith("not applicable: "), row
        else:
            assert entry, row
            for name in entry:
                assert callable(globals().get(name)), f"row {row} names {name}, which is no test of this file"


# --- helpers ----------------------------------------------------------------------------------------------------------

VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "autoregressive": AutoregressiveVerifier,
    "paper": SpatialDraftVerifier.paper,
    "paper, staged blocks": lambda: SpatialDraftVerifier.paper(block_size=2, trailing_rounds=1),
    "paper, horizontal only": lambda: SpatialDraftVerifier.paper(horizontal_only=True, draft="sample"),
    "merged": lambda: SpatialDraftVerifier(rounds=2),
    "lossless": lambda: SpatialDraftVerifier(lossless=True),
    "lossless, fresh noise": lambda: SpatialDraftVerifier(lossless=True, coupling="residual"),
    "jacobi": JacobiVerifier,
    "wavefront": WavefrontVerifier,
}
every_verifier = pytest.mark.parametrize("verifier", [make() for make in VERIFIERS.values()], ids=list(VERIFIERS))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(pipe: SpatialSpeculativePipeline, prompt: str | list[str] = PROMPT, **kwargs: Any) -> torch.Tensor:
    """Codes of a call with seed 0, unless said otherwise."""
    return pipe(prompt, **{"generator": seeded(), "output_type": "latent", **kwargs}).codes


def load(source: Any, **kwargs: Any) -> SpatialSpeculativePipeline:
    pipe = SpatialSpeculativePipeline.from_pretrained(source, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def count_passes(pipe: SpatialSpeculativePipeline) -> list[int]:
    """A list that grows by the batch size of every pass of the decoder."""
    passes: list[int] = []

    def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        passes.append(kwargs["inputs_embeds"].shape[0])

    pipe.backbone.model.language_model.register_forward_pre_hook(count, with_kwargs=True)
    return passes


def stop_after(passes: int) -> Callable[..., dict[str, Any]]:
    def callback(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step + 1 == passes
        return kwargs

    return callback


@pytest.fixture
def pipe() -> SpatialSpeculativePipeline:
    return tiny_pipeline()


@pytest.fixture(scope="module")
def base_codes() -> torch.Tensor:
    """What an untouched tiny pipeline draws for `PROMPT` with seed 0."""
    return draw(tiny_pipeline())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny pipeline; not to be written to."""
    folder = tmp_path_factory.mktemp("saved") / "pipeline"
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone and its tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("saved") / "backbone"
    tiny_janus().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft heads that name the repository of their backbone."""
    folder = tmp_path_factory.mktemp("saved") / "heads"
    heads = tiny_heads(tiny_janus())
    heads.register_to_config(base_model="user/tiny-janus")
    heads.save_pretrained(folder)
    return folder


# --- rows 1 to 28 -----------------------------------------------------------------------------------------------------


def test_a_saved_pipeline_draws_the_same_codes(saved: Path, base_codes: torch.Tensor) -> None:
    assert torch.equal(draw(load(saved)), base_codes)


def test_saving_keeps_every_component_and_setting(tmp_path: Path) -> None:
    pipe = tiny_pipeline(verifier=SpatialDraftVerifier(rounds=1, temperature=0.7, top_k=9))
    expected = draw(pipe)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["heads"] == ["ssd_pipelines", "SpatialDraftHeads"]
    assert index["verifier"] == ["ssd_pipelines", "SpatialDraftVerifier"]

    again = load(tmp_path)
    assert {name: type(part) for name, part in again.components.items()} == {
        name: type(part) for name, part in pipe.components.items()
    }
    assert dict(again.verifier.config).items() >= {"rounds": 1, "temperature": 0.7, "top_k": 9}.items()
    assert torch.equal(draw(again), expected)


def test_a_picture_has_the_announced_shape_and_range(pipe: SpatialSpeculativePipeline) -> None:
    output = pipe(PROMPT, generator=seeded(), output_type="pt")
    assert output.images.shape == (1, 3, PIXELS, PIXELS)
    assert output.codes.shape == (1, SIDE, SIDE)
    assert output.codes.min() >= 0
    assert output.codes.max() < 64
    assert 0 <= output.images.min() < output.images.max() <= 1


def test_the_call_signature_is_that_of_a_diffusers_pipeline() -> None:
    parameters = inspect.signature(SpatialSpeculativePipeline.__call__).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty and name != "self"]
    assert required == [], "a prompt, or encoded ones"
    assert list(parameters)[1] == "prompt"
    expected = "height width guidance_scale negative_prompt num_images_per_prompt generator latents output_type "
    expected += "return_dict callback_on_step_end callback_on_step_end_tensor_inputs"
    assert set(expected.split()) <= set(parameters)
    # The deviation: how many passes a picture takes follows from the grid and the verifier, nobody chooses it.
    assert "num_inference_steps" not in parameters


def test_a_batch_of_unequal_prompts_gives_a_picture_each(pipe: SpatialSpeculativePipeline) -> None:
    images = pipe([PROMPT, LONG_PROMPT], generator=[seeded(0), seeded(1)], output_type="pt").images
    assert images.shape == (2, 3, PIXELS, PIXELS)
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize(
    ("row_end", "guidance_scale"),
    [(False, 1.0), (False, 5.0), (True, 5.0)],
    ids=["without guidance", "with guidance", "row ends"],
)
@every_verifier
def test_a_picture_of_a_batch_is_its_solo_picture(verifier: Verifier, row_end: bool, guidance_scale: float) -> None:
    pipe = tiny_pipeline(row_end=row_end, verifier=verifier)
    prompts = [PROMPT, LONG_PROMPT, "blue"]
    changed: list[torch.Tensor] = []

    def watch(_: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        changed.append(kwargs["corrected"])
        return {}

    together = draw(
        pipe,
        prompts,
        guidance_scale=guidance_scale,
        generator=[seeded(k) for k in range(3)],
        callback_on_step_end=watch,
        callback_on_step_end_tensor_inputs=["corrected"],
    )
    alone = [draw(pipe, prompt, guidance_scale=guidance_scale, generator=seeded(k)) for k, prompt in enumerate(prompts)]
    assert torch.equal(together, torch.cat(alone))
    if isinstance(verifier, SpatialDraftVerifier):
        assert any((mask != mask[:1]).any() for mask in changed), "the rows have to accept differently to prove much"


def test_a_tuple_holds_the_same_pictures_as_the_output_object(pipe: SpatialSpeculativePipeline) -> None:
    output = pipe(PROMPT, generator=seeded(), output_type="np")
    as_tuple = pipe(PROMPT, generator=seeded(), output_type="np", return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == 1
    assert np.array_equal(as_tuple[0], output.images)
    assert np.array_equal(output[0], output.images)


def test_components_are_those_of_the_constructor(pipe: SpatialSpeculativePipeline) -> None:
    parameters = set(inspect.signature(SpatialSpeculativePipeline.__init__).parameters) - {"self"}
    assert set(pipe.components) == parameters
    again = SpatialSpeculativePipeline(**pipe.components)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(draw(again), draw(pipe))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.gpu
def test_half_precision_on_a_gpu_draws_finite_pictures(pipe: SpatialSpeculativePipeline, dtype: torch.dtype) -> None:
    images = pipe.to("cuda", dtype)(PROMPT, generator=seeded(), output_type="pt").images
    assert images.isfinite().all()


@pytest.mark.parametrize("heads_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bfloat16_and_mixed_dtypes_draw_finite_pictures(
    pipe: SpatialSpeculativePipeline, heads_dtype: torch.dtype
) -> None:
    pipe.backbone.to(torch.bfloat16)
    pipe.heads.to(heads_dtype)
    images = pipe([PROMPT, LONG_PROMPT], generator=seeded(), output_type="pt").images
    assert images.isfinite().all()
    assert pipe.backbone.dtype == torch.bfloat16
    assert pipe.heads.dtype == heads_dtype


@pytest.mark.gpu
def test_float16_on_a_gpu_survives_a_round_trip(saved: Path, tmp_path: Path) -> None:
    pipe = load(saved, dtype=torch.float16).to("cuda")
    expected = draw(pipe)
    pipe.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float16).to("cuda")
    assert again.backbone.dtype == again.heads.dtype == torch.float16
    assert torch.equal(draw(again), expected)


def test_bfloat16_survives_a_round_trip(saved: Path, tmp_path: Path) -> None:
    # Loaded, not cast: `to` would round the rotary frequencies as well, which loading leaves in float32.
    pipe = load(saved, dtype=torch.bfloat16)
    expected = draw(pipe)
    pipe.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.bfloat16)
    assert again.backbone.dtype == again.heads.dtype == torch.bfloat16
    assert torch.equal(draw(again), expected)


def test_absent_heads_survive_a_round_trip(pipe: SpatialSpeculativePipeline, tmp_path: Path) -> None:
    pipe.unload_ssd_heads()
    expected = draw(pipe)
    pipe.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.heads is None
    assert torch.equal(draw(again), expected)


def test_heads_can_be_left_out_on_loading(saved: Path) -> None:
    pipe = load(saved, heads=None)
    assert pipe.heads is None
    assert isinstance(pipe.verifier, SpatialDraftVerifier)
    reference = tiny_pipeline(verifier=AutoregressiveVerifier())
    assert torch.equal(draw(pipe), draw(reference))


@pytest.mark.gpu
def test_a_pipeline_moves_to_a_gpu_and_back(pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor) -> None:
    pipe.to("cuda")
    assert pipe.backbone.device.type == pipe.heads.device.type == "cuda"
    output = pipe(PROMPT, generator=seeded(), output_type="pt")
    assert output.images.isfinite().all()
    assert torch.equal(draw(pipe), output.codes), "a CPU generator reproduces on a GPU"
    assert torch.equal(draw(pipe.to("cpu")), base_codes)


def test_a_dtype_reaches_every_component(pipe: SpatialSpeculativePipeline) -> None:
    pipe.to(torch.float16)
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) == 2
    for module in modules:
        assert {p.dtype for p in module.parameters()} == {torch.float16}
    assert pipe.dtype == torch.float16


def test_num_images_per_prompt_multiplies_the_batch(pipe: SpatialSpeculativePipeline) -> None:
    generators = [seeded(k) for k in range(6)]
    codes = draw(pipe, [PROMPT, LONG_PROMPT], num_images_per_prompt=3, generator=generators)
    assert codes.shape == (6, SIDE, SIDE)
    assert torch.equal(codes[4:5], draw(pipe, LONG_PROMPT, generator=seeded(4)))
    assert torch.equal(codes[:1], draw(pipe, generator=seeded(0))), "nothing of the larger batch is left over"


def test_guidance_changes_the_picture_and_not_its_shape(pipe: SpatialSpeculativePipeline) -> None:
    without, with_guidance = draw(pipe, guidance_scale=1.0), draw(pipe, guidance_scale=7.5)
    assert without.shape == with_guidance.shape
    assert not torch.equal(without, with_guidance)


def test_encoded_prompts_draw_what_the_prompts_draw(pipe: SpatialSpeculativePipeline) -> None:
    encoded = pipe.encode_prompt([PROMPT, LONG_PROMPT], "a negative", num_images_per_prompt=2)
    call = {"guidance_scale": 3.0, "output_type": "latent"}
    ours = pipe(prompt_embeds=encoded, generator=[seeded(k) for k in range(4)], **call)
    wanted = pipe(
        [PROMPT, LONG_PROMPT],
        negative_prompt="a negative",
        num_images_per_prompt=2,
        generator=[seeded(k) for k in range(4)],
        **call,
    )
    assert torch.equal(ours.codes, wanted.codes)


@every_verifier
def test_time_is_split_into_phases_that_add_up(verifier: Verifier) -> None:
    pipe = tiny_pipeline(verifier=verifier)
    seconds = pipe(PROMPT, generator=seeded()).stats.seconds
    phases = {"prompt", "passes", "correction", "decoding"} | ({"drafting"} if verifier.needs_heads else set())
    assert phases <= set(seconds) <= phases | {"drafting", "total"}
    assert all(value > 0 for name, value in seconds.items() if name in phases)
    assert sum(seconds.values()) - seconds["total"] <= seconds["total"]


def test_every_advertised_callback_tensor_can_be_asked_for(pipe: SpatialSpeculativePipeline) -> None:
    names = list(SpatialSpeculativePipeline._callback_tensor_inputs)
    assert {"latents", "drafted", "corrected"} <= set(names)
    seen: list[dict[str, torch.Tensor]] = []

    def collect(_: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(kwargs))  # without copies: what a callback keeps must not change under it
        return kwargs

    final = draw(pipe, callback_on_step_end=collect, callback_on_step_end_tensor_inputs=names)
    for step in seen:
        assert set(step) == set(names)
        assert step["latents"].dtype == torch.long
        assert step["drafted"].dtype == step["corrected"].dtype == torch.bool
        assert {tuple(tensor.shape) for tensor in step.values()} == {(1, SIDE, SIDE)}
    assert torch.equal(seen[-1]["latents"], final)
    assert not seen[-1]["drafted"].any()
    for before, after in zip(seen, seen[1:], strict=False):
        was_code = before["latents"] >= 0
        changed = (before["latents"] != after["latents"]) & was_code
        # What was drafted anew replaces what was never drafted, so every change of a code is a correction.
        assert torch.equal(after["corrected"], changed)
        assert not (changed & ~before["drafted"]).any(), "a final code changed"


def test_each_tensor_can_be_asked_for_alone() -> None:
    pipe = tiny_pipeline(row_end=True)
    for name in SpatialSpeculativePipeline._callback_tensor_inputs:
        keys: list[set[str]] = []

        def collect(_: Any, step: int, timestep: int, kwargs: dict[str, Any], keys: list[set[str]] = keys) -> None:
            keys.append(set(kwargs))

        draw(pipe, callback_on_step_end=collect, callback_on_step_end_tensor_inputs=[name])
        assert keys
        assert all(seen == {name} for seen in keys)


@every_verifier
def test_latents_edited_in_the_last_step_are_drawn(verifier: Verifier) -> None:
    pipe = tiny_pipeline(verifier=verifier)

    def zero_the_last(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == pipe.num_timesteps - 1:
            kwargs["latents"] = torch.zeros_like(kwargs["latents"])
        return kwargs

    output = pipe(PROMPT, generator=seeded(), output_type="pt", callback_on_step_end=zero_the_last)
    assert not output.codes.any()
    assert torch.equal(output.images, pipe.decode_latents(torch.zeros(1, SIDE, SIDE, dtype=torch.long), "pt"))


@every_verifier
def test_guidance_changed_in_a_callback_counts_once_a_step(verifier: Verifier) -> None:
    pipe = tiny_pipeline(verifier=verifier)

    def raise_guidance(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale += 1.0
        return kwargs

    changed = draw(pipe, guidance_scale=2.0, callback_on_step_end=raise_guidance)
    assert pipe.guidance_scale == 2.0 + pipe.num_timesteps
    assert not torch.equal(changed, draw(pipe, guidance_scale=2.0)), "the new scale has to be used"


def test_a_variant_round_trip_keeps_names_and_weights(pipe: SpatialSpeculativePipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path, variant="fp16")
    weights = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert weights == ["backbone/model.fp16.safetensors", "heads/diffusion_pytorch_model.fp16.safetensors"]
    again = load(tmp_path, variant="fp16")
    for name in ("backbone", "heads"):
        ours, theirs = getattr(pipe, name).state_dict(), getattr(again, name).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_wrong_variant_is_refused(saved: Path, pipe: SpatialSpeculativePipeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variant=fp16"):
        load(saved, variant="fp16")
    pipe.save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path)


def test_a_dtype_can_be_given_per_component(saved: Path, saved_backbone: Path, saved_heads: Path) -> None:
    dtype = {"backbone": torch.bfloat16, "default": torch.float32}
    for pipe in (load(saved, dtype=dtype), load(saved_backbone, heads=saved_heads, dtype=dtype)):
        assert pipe.backbone.dtype == torch.bfloat16
        assert pipe.heads.dtype == torch.float32
        assert draw(pipe).min() >= 0


def test_torch_dtype_is_an_alias_with_a_warning(saved: Path, saved_backbone: Path) -> None:
    for source in (saved, saved_backbone):
        with pytest.warns(FutureWarning, match="`torch_dtype` is deprecated"):
            pipe = load(source, torch_dtype=torch.bfloat16)
        assert pipe.backbone.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="give `dtype` alone"):
            load(source, torch_dtype=torch.bfloat16, dtype=torch.bfloat16)


@pytest.mark.gpu
def test_sequential_offload_on_a_gpu_draws_the_same_codes(pipe: SpatialSpeculativePipeline) -> None:
    expected = draw(tiny_pipeline().to("cuda"))
    pipe.enable_sequential_cpu_offload()
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
    assert all(p.device.type == "meta" for p in pipe.backbone.parameters())


@pytest.mark.gpu
def test_model_offload_on_a_gpu_draws_the_same_codes(pipe: SpatialSpeculativePipeline, saved_heads: Path) -> None:
    expected = draw(tiny_pipeline().to("cuda"))
    pipe.enable_model_cpu_offload()
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
        assert pipe.backbone.device.type == "cpu", "the weights are back"
        assert isinstance(pipe.backbone._hf_hook, CpuOffload)
    pipe.load_ssd_heads(saved_heads)  # under offload the backbone lies on the CPU, the heads must not
    assert torch.equal(draw(pipe), expected)


def test_model_offload_draws_the_same_codes_twice(pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor) -> None:
    for _ in range(2):
        pipe.enable_model_cpu_offload(device="cpu")
        for _ in range(2):
            assert torch.equal(draw(pipe), base_codes)
            assert isinstance(pipe.backbone._hf_hook, CpuOffload)
            assert not hasattr(pipe.heads, "_hf_hook"), "the heads are excluded"
    other = SpatialSpeculativePipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    assert torch.equal(draw(other), base_codes), "components of an offloaded pipeline work in another"


class _CountingHook(ModelHook):
    """A hook that does what offload hooks do, run before the forward, and counts it."""

    def __init__(self) -> None:
        self.entered = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.entered += 1
        return args, kwargs


def test_submodules_are_entered_under_the_models_hook(pipe: SpatialSpeculativePipeline) -> None:
    hook = _CountingHook()
    add_hook_to_module(pipe.backbone, hook)
    entered: list[int] = []
    pipe.backbone.get_input_embeddings().register_forward_pre_hook(lambda *_: entered.append(hook.entered))
    codes = draw(pipe)
    assert entered
    assert min(entered) >= 1, "the prompt was embedded before the model's hook had run"
    before = hook.entered
    pipe.decode_latents(codes, "np")
    assert hook.entered > before


@pytest.mark.parametrize("device_map", ["cpu", "balanced"])
def test_a_device_map_draws_the_same_codes(saved: Path, base_codes: torch.Tensor, device_map: str) -> None:
    assert torch.equal(draw(load(saved, device_map=device_map)), base_codes)


def test_a_backbone_and_heads_load_with_a_device_map(
    saved_backbone: Path, saved_heads: Path, base_codes: torch.Tensor
) -> None:
    assert torch.equal(draw(load(saved_backbone, heads=saved_heads, device_map="cpu")), base_codes)


@pytest.mark.parametrize(
    "options",
    [
        {"offload_type": "leaf_level"},
        {"offload_type": "block_level", "num_blocks_per_group": 1},
        {"offload_type": "leaf_level", "exclude_modules": ["heads"]},
    ],
    ids=["leaf", "block", "without heads"],
)
def test_group_offload_draws_the_same_codes(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor, options: dict[str, Any]
) -> None:
    pipe.enable_group_offload(onload_device=torch.device("cpu"), **options)
    for _ in range(2):
        output = pipe(PROMPT, generator=seeded(), output_type="pt")
        assert torch.equal(output.codes, base_codes)
        assert output.images.isfinite().all()


def test_heads_stored_in_float8_still_draft(pipe: SpatialSpeculativePipeline) -> None:
    # The backbone is no denoiser of Diffusers, so the row applies to the heads alone.
    pipe.heads.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert pipe.heads.horizontal[0].w0.weight.dtype == torch.float8_e4m3fn
    output = pipe(PROMPT, generator=seeded(), output_type="pt")
    assert output.images.isfinite().all()
    assert output.stats.nfe < output.stats.tokens


def test_from_pipe_shares_components_and_draws_the_same(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor
) -> None:
    again = SpatialSpeculativePipeline.from_pipe(pipe, dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    assert again.backbone is pipe.backbone
    assert again.heads is pipe.heads
    assert dict(again.config) == dict(pipe.config)
    assert torch.equal(draw(again), base_codes)

    plain = SpatialSpeculativePipeline.from_pipe(pipe, verifier=AutoregressiveVerifier(), dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    draw(plain)
    assert isinstance(pipe.verifier, SpatialDraftVerifier)
    assert torch.equal(draw(pipe), base_codes), "the new pipeline leaves the old one alone"


def test_from_pipe_keeps_the_dtype(pipe: SpatialSpeculativePipeline) -> None:
    pipe.backbone.to(torch.bfloat16)  # the heads stay in float32
    again = SpatialSpeculativePipeline.from_pipe(pipe)
    assert again.backbone.dtype == torch.bfloat16
    assert again.heads.dtype == torch.float32


def test_output_types_show_the_same_picture(pipe: SpatialSpeculativePipeline) -> None:
    outputs = {kind: pipe(PROMPT, generator=seeded(), output_type=kind) for kind in ("pt", "np", "pil", "latent")}
    assert all(torch.equal(output.codes, outputs["pt"].codes) for output in outputs.values())
    assert torch.equal(outputs["latent"].images, outputs["pt"].codes)
    as_array = outputs["pt"].images.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(as_array, outputs["np"].images)
    assert outputs["pil"].images[0].size == (PIXELS, PIXELS)
    assert np.array_equal((as_array[0] * 255).round().astype("uint8"), np.asarray(outputs["pil"].images[0]))
    assert torch.equal(pipe.decode_latents(outputs["pt"].codes, "pt"), outputs["pt"].images)


@pytest.mark.parametrize("row_end", [False, True], ids=["plain grid", "row ends"])
@every_verifier
def test_an_interrupted_run_resumes_from_its_codes(verifier: Verifier, row_end: bool) -> None:
    pipe = tiny_pipeline(row_end=row_end, verifier=verifier)
    total = pipe(PROMPT, generator=seeded(), output_type="latent").stats.nfe
    tried = 0
    for passes in (1, total // 2, total - 3):
        partial = pipe(PROMPT, generator=seeded(), callback_on_step_end=stop_after(passes), output_type="latent")
        rows = partial.stats.rows_completed
        resumed = pipe(PROMPT, generator=seeded(1), latents=partial.codes, output_type="latent")
        assert torch.equal(resumed.codes[:, :rows], partial.codes[:, :rows])
        assert resumed.codes.min() >= 0
        assert resumed.stats.rows_completed == SIDE
        tried += 0 < rows < SIDE
    assert tried
    whole = draw(pipe)
    assert torch.equal(draw(pipe, latents=whole, generator=seeded(1)), whole), "a finished picture stays as it is"


def test_a_greedy_run_that_was_resumed_is_the_run_that_was_not() -> None:
    pipe = tiny_pipeline(verifier=AutoregressiveVerifier(temperature=0))
    partial = pipe(PROMPT, callback_on_step_end=stop_after(10), output_type="latent")
    assert partial.stats.rows_completed == 2
    assert torch.equal(draw(pipe, latents=partial.codes), draw(pipe))


def test_heads_load_save_and_unload_like_an_adapter(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor, tmp_path: Path
) -> None:
    plain = tiny_pipeline()
    plain.unload_ssd_heads()
    autoregressive = draw(plain)

    pipe.save_ssd_heads(tmp_path)
    saved = ["config.json", "diffusion_pytorch_model.safetensors", "verifier_config.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == saved
    plain.load_ssd_heads(tmp_path)
    assert torch.equal(draw(plain), base_codes)
    plain.verifier = SpatialDraftVerifier(rounds=0)
    drafts = draw(plain)
    plain.load_ssd_heads(tiny_heads(plain.backbone, seed=1))
    assert not torch.equal(draw(plain), drafts), "other heads draft otherwise"
    plain.unload_ssd_heads()
    assert torch.equal(draw(plain), autoregressive)
    with pytest.raises(ValueError, match="no draft heads to save"):
        plain.save_ssd_heads(tmp_path)
    assert not hasattr(plain, "fuse_ssd_heads"), "draft heads are no change to the backbone"


def test_loaded_heads_are_saved_with_the_pipeline(tmp_path: Path, base_codes: torch.Tensor) -> None:
    pipe = SpatialSpeculativePipeline(tiny_janus(), tiny_tokenizer())
    pipe.load_ssd_heads(tiny_heads(pipe.backbone))
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["heads"] == ["ssd_pipelines", "SpatialDraftHeads"]
    assert torch.equal(draw(load(tmp_path)), base_codes)


@pytest.mark.parametrize("offload", [False, True], ids=["no offload", "model offload"])
def test_unloading_heads_leaves_hooks_and_weights_alone(offload: bool) -> None:
    pipe, reference = tiny_pipeline(), tiny_pipeline(verifier=AutoregressiveVerifier())
    if offload:
        pipe.enable_model_cpu_offload(device="cpu")

    def traces() -> list[Any]:
        return [
            (name, type(getattr(module, "_hf_hook", None)), len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in pipe.backbone.named_modules()
        ]

    before = traces()
    weights = {key: value.clone() for key, value in pipe.backbone.state_dict().items()}
    draw(pipe)
    pipe.unload_ssd_heads()
    assert traces() == before
    output = pipe(PROMPT, generator=seeded(), output_type="latent")
    assert torch.equal(output.codes, draw(reference))
    assert output.stats.nfe == output.stats.tokens == SIDE * SIDE
    pipe.load_ssd_heads(tiny_heads(pipe.backbone))
    assert traces() == before
    after = pipe.backbone.state_dict()
    assert all(torch.equal(after[key], value) for key, value in weights.items())


# --- randomness -------------------------------------------------------------------------------------------------------


@every_verifier
def test_a_seed_decides_the_picture(verifier: Verifier) -> None:
    pipe = tiny_pipeline(verifier=verifier)
    prompts = [PROMPT, LONG_PROMPT]
    assert torch.equal(draw(pipe, prompts, generator=seeded(3)), draw(pipe, prompts, generator=seeded(3)))
    assert not torch.equal(draw(pipe, prompts, generator=seeded(3)), draw(pipe, prompts, generator=seeded(4)))


@every_verifier
def test_the_global_random_state_is_left_alone(verifier: Verifier) -> None:
    pipe = tiny_pipeline(verifier=verifier)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    draw(pipe)
    draw(pipe, [PROMPT, LONG_PROMPT], generator=[seeded(0), seeded(1)])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_without_a_generator_torchs_own_seed_decides(pipe: SpatialSpeculativePipeline) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = draw(pipe, generator=None)
        assert not torch.equal(draw(pipe, generator=None), first)
        torch.manual_seed(5)
        assert torch.equal(draw(pipe, generator=None), first)


@pytest.mark.gpu
def test_a_cpu_generator_gives_a_gpu_its_numbers(pipe: SpatialSpeculativePipeline) -> None:
    pipe.to("cuda")
    generators = [seeded(0), torch.Generator("cuda").manual_seed(1)]
    codes = draw(pipe, [PROMPT, LONG_PROMPT], generator=generators)
    assert torch.equal(codes[:1], draw(pipe))
    assert torch.equal(codes[1:], draw(pipe, LONG_PROMPT, generator=torch.Generator("cuda").manual_seed(1)))


def test_two_threads_on_one_pipeline_get_their_solo_pictures(pipe: SpatialSpeculativePipeline) -> None:
    jobs = [(PROMPT, 0), (LONG_PROMPT, 1)] * 4
    alone = [draw(pipe, prompt, generator=seeded(seed)) for prompt, seed in jobs]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda job: draw(pipe, job[0], generator=seeded(job[1])), jobs))
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours, theirs)
    assert not pipe.backbone.model.language_model.norm._forward_pre_hooks


# --- passes, callbacks, interruption ----------------------------------------------------------------------------------


@every_verifier
def test_step_counts_add_up(verifier: Verifier) -> None:
    pipe = tiny_pipeline(row_end=True, verifier=verifier)
    steps: list[tuple[int, int, int]] = []

    def collect(pipe: Any, step: int, passes_left: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append((step, passes_left, pipe.num_timesteps))
        return kwargs

    passes = count_passes(pipe)
    stats = pipe(PROMPT, generator=seeded(), output_type="latent", callback_on_step_end=collect).stats
    assert [step for step, _, _ in steps] == list(range(stats.nfe))
    assert all(step + 1 + left == total for step, left, total in steps)
    assert steps[-1] == (stats.nfe - 1, 0, stats.nfe)
    assert len(passes) == stats.nfe == pipe.num_timesteps


class _RecordCommitted(SpatialDraftVerifier):
    """Notes how much was committed after every pass."""

    def step(self, state: Any) -> None:
        super().step(state)
        self.committed = [*getattr(self, "committed", []), int(state.committed)]


@pytest.mark.parametrize("row_end", [False, True], ids=["plain grid", "row ends"])
@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 2},
        {},
        {"commit": "separate", "adaptive": False, "refresh": 0, "rounds": 2, "block_size": 2, "trailing_rounds": 1},
        {"horizontal_only": True, "rounds": 1},
    ],
    ids=str,
)
def test_the_cache_is_exactly_as_long_as_what_is_committed(settings: dict[str, Any], row_end: bool) -> None:
    verifier = _RecordCommitted(**settings)
    pipe = tiny_pipeline(row_end=row_end, verifier=verifier)
    caches: list[Any] = []
    fed: list[int] = []

    def spy(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        caches.append(kwargs.get("cache", kwargs.get("past_key_values")))
        fed.append(kwargs["inputs_embeds"].shape[1])

    pipe.backbone.model.language_model.register_forward_pre_hook(spy, with_kwargs=True)
    lengths: list[int] = []

    def measure(*_: Any) -> None:
        lengths.append(caches[-1].get_seq_length())

    draw(pipe, callback_on_step_end=measure)
    prompt_length = pipe.encode_prompt(PROMPT).length
    assert fed[0] == prompt_length
    assert lengths == [prompt_length + committed for committed in verifier.committed]
    assert sum(fed) > lengths[-1], "something has to have been rolled back"


@every_verifier
def test_an_interrupted_run_returns_the_rows_it_has(verifier: Verifier) -> None:
    pipe = tiny_pipeline(verifier=verifier)
    whole = pipe(PROMPT, generator=seeded(), output_type="latent")
    passes = count_passes(pipe)
    output = pipe(PROMPT, generator=seeded(), output_type="pt", callback_on_step_end=stop_after(whole.stats.nfe - 3))
    rows = output.stats.rows_completed
    assert 0 < rows < SIDE
    assert len(passes) == output.stats.nfe == whole.stats.nfe - 3, "it returns promptly"
    assert torch.equal(output.codes[:, :rows], whole.codes[:, :rows])
    assert (output.codes[:, rows:] < 0).all()
    grey = output.images[:, :, rows * PIXELS // SIDE :]
    assert torch.equal(grey, torch.full_like(grey, 0.5))

    assert not pipe.backbone.model.language_model.norm._forward_pre_hooks
    assert torch.equal(draw(pipe), whole.codes), "the next call is a fresh pipeline's"
    assert not pipe.interrupt


def test_a_callback_that_raises_leaves_a_usable_pipeline(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        draw(pipe, callback_on_step_end=fail)
    assert not pipe.backbone.model.language_model.norm._forward_pre_hooks
    assert torch.equal(draw(pipe), base_codes)


def test_a_callback_object_of_diffusers_names_its_own_tensors(pipe: SpatialSpeculativePipeline) -> None:
    class Collect(PipelineCallback):
        tensor_inputs = ["drafted"]
        keys: list[set[str]] = []

        def callback_fn(self, pipeline: Any, step: int, timestep: int, callback_kwargs: dict[str, Any]) -> Any:
            self.keys.append(set(callback_kwargs))
            return callback_kwargs

    callback = Collect(cutoff_step_ratio=None, cutoff_step_index=0)
    output = pipe(PROMPT, generator=seeded(), output_type="latent", callback_on_step_end=callback)
    assert callback.keys == [{"drafted"}] * output.stats.nfe


def test_the_progress_bar_moves_from_the_first_pass(pipe: SpatialSpeculativePipeline) -> None:
    screen = io.StringIO()
    config = {"file": screen, "mininterval": 0, "ascii": True}
    pipe.verifier = SpatialDraftVerifier.paper()  # whose passes are known beforehand
    pipe.set_progress_bar_config(**config)
    shown: list[str] = []
    output = pipe(
        PROMPT,
        generator=seeded(),
        output_type="latent",
        callback_on_step_end=lambda *_: shown.append(screen.getvalue()),
    )
    total = output.stats.nfe
    assert f"0/{total}" in shown[0]
    assert f"1/{total}" in shown[1]
    assert f"{total}/{total}" in screen.getvalue()
    assert pipe._progress_bar_config == config


# --- heads of another backbone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"hidden_size": 64}, ["hidden size 64 against 32"]),
        ({"image_vocab_size": 128}, ["image vocabulary 128 against 64"]),
        ({"side": 6}, ["grid columns 6 against 4"]),
        ({"side": 6, "hidden_size": 64}, ["grid columns 6 against 4", "hidden size 64 against 32"]),
    ],
    ids=["hidden size", "image vocabulary", "grid", "two at once"],
)
def test_wrong_heads_are_refused_before_any_forward(
    pipe: SpatialSpeculativePipeline, base_codes: torch.Tensor, tmp_path: Path, other: dict[str, int], named: list[str]
) -> None:
    wrong = tiny_heads(tiny_janus(**other))
    wrong.register_to_config(base_model="user/another-model")
    wrong.save_pretrained(tmp_path)
    passes, heads = count_passes(pipe), pipe.heads
    attempts: list[Callable[[], Any]] = [
        lambda: pipe.load_ssd_heads(wrong),
        lambda: pipe.load_ssd_heads(tmp_path),
        lambda: SpatialSpeculativePipeline(pipe.backbone, pipe.tokenizer, heads=wrong),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError) as refusal:
            attempt()
        for part in ["user/another-model", *named]:
            assert part in str(refusal.value)
    assert not passes
    assert pipe.heads is heads
    assert torch.equal(draw(pipe), base_codes)


def test_heads_for_another_row_end_are_refused(pipe: SpatialSpeculativePipeline) -> None:
    with pytest.raises(ValueError, match="row-end tokens True against False"):
        pipe.load_ssd_heads(tiny_pipeline(row_end=True).heads)


# --- loading from elsewhere -------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys, torch
from ssd_pipelines import SpatialSpeculativePipeline

report = {}
for source in sys.argv[2:]:
    try:
        pipe = SpatialSpeculativePipeline.from_pretrained(source)
        pipe.set_progress_bar_config(disable=True)
        codes = pipe(sys.argv[1], generator=torch.Generator().manual_seed(0), output_type="latent").codes
        classes = {name: type(part).__name__ for name, part in pipe.components.items()}
        report[source] = {"codes": codes.tolist(), "classes": classes}
    except Exception as error:
        report[source] = {"error": repr(error)}
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def fresh_process(saved: Path, filled_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a new interpreter makes of a saved folder and of cached repositories, with the Hub switched off."""
    home = tmp_path_factory.mktemp("home")
    switches = {"HF_HOME": str(home), "HF_HUB_CACHE": str(filled_cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, PROMPT, str(saved), "user/saved", "user/ssd-tiny-janus"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **switches})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_fresh_process_draws_the_same_codes(
    fresh_process: dict[str, Any], saved: Path, base_codes: torch.Tensor
) -> None:
    report = fresh_process[str(saved)]
    assert report.get("codes") == base_codes.tolist(), report
    expected = {name: type(part).__name__ for name, part in tiny_pipeline().components.items()}
    # Which of its classes for fast tokenizers transformers picks is its own affair.
    assert {**report["classes"], "tokenizer": ""} == {**expected, "tokenizer": ""}


@pytest.mark.parametrize("source", ["user/saved", "user/ssd-tiny-janus"])
def test_the_hubs_offline_switch_is_enough_to_load_from_the_cache(
    fresh_process: dict[str, Any], base_codes: torch.Tensor, source: str
) -> None:
    assert fresh_process[source].get("codes") == base_codes.tolist(), fresh_process[source]


class _FakeHub:
    """Serves folders as repositories, in place of the two functions of `huggingface_hub` that `hub.py` calls."""

    def __init__(self, repositories: dict[str, Path], cache: Path) -> None:
        self.repositories, self.cache = repositories, cache
        self.fetched: list[str] = []
        self.arguments: list[dict[str, Any]] = []

    def _fetch(self, repo_id: str, filename: str) -> Path:
        target = self.cache / repo_id / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.repositories[repo_id] / filename, target)
        self.fetched.append(filename)
        return target

    def hf_hub_download(self, repo_id: str, filename: str, **kwargs: Any) -> str:
        self.arguments.append(kwargs)
        if not (self.repositories[repo_id] / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(self._fetch(repo_id, filename))

    def snapshot_download(self, repo_id: str, allow_patterns: Any = None, **kwargs: Any) -> str:
        self.arguments.append(kwargs)
        folder = self.repositories[repo_id]
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            self._fetch(repo_id, name)
        return str(self.cache / repo_id)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_FakeHub]:
    hub = _FakeHub({}, tmp_path / "cache")
    monkeypatch.setattr("ssd_pipelines.hub.repositories.hf_hub_download", hub.hf_hub_download)
    monkeypatch.setattr("ssd_pipelines.hub.repositories.snapshot_download", hub.snapshot_download)
    yield hub


def test_a_pipeline_on_the_hub_loads_without_pickles_and_without_code(
    saved: Path, base_codes: torch.Tensor, tmp_path: Path, fake_hub: _FakeHub
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(saved, repository)
    others = ["pipeline.py", "heads/ssd_pipelines.py", "backbone/pytorch_model.bin", "heads/x.pt", "y.pkl", "z.ckpt"]
    for name in others:
        (repository / name).write_text("raise SystemExit('never to be read')")
    fake_hub.repositories["user/repo"] = repository

    pipe = load("user/repo", revision="abc", token="secret")
    assert torch.equal(draw(pipe), base_codes)
    assert {Path(name).suffix for name in fake_hub.fetched} == {".json", ".safetensors"}
    for arguments in fake_hub.arguments:
        assert arguments["revision"] == "abc"
        assert arguments["token"] == "secret"


def test_only_the_wanted_variant_is_fetched_from_the_hub(
    saved: Path, base_codes: torch.Tensor, tmp_path: Path, fake_hub: _FakeHub
) -> None:
    repository = tmp_path / "repository"
    tiny_pipeline().save_pretrained(repository)
    tiny_pipeline().save_pretrained(repository, variant="fp16")
    fake_hub.repositories["user/repo"] = repository
    assert torch.equal(draw(load("user/repo", variant="fp16")), base_codes)
    assert [n for n in fake_hub.fetched if n.endswith(".safetensors") and ".fp16." not in n] == []


def _put_into_cache(cache: Path, repo_id: str, folder: Path) -> None:
    """Lay a folder out as the Hub client caches a repository."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)


@pytest.fixture(scope="module")
def filled_cache(
    tmp_path_factory: pytest.TempPathFactory, saved: Path, saved_backbone: Path, saved_heads: Path
) -> Path:
    cache = tmp_path_factory.mktemp("hub")
    for repo_id, folder in (
        ("user/saved", saved),
        ("user/tiny-janus", saved_backbone),
        ("user/ssd-tiny-janus", saved_heads),
    ):
        _put_into_cache(cache, repo_id, folder)
    return cache


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("user/saved", {}),
        ("user/tiny-janus", {"heads": "user/ssd-tiny-janus"}),
        ("user/ssd-tiny-janus", {}),
    ],
    ids=["saved pipeline", "backbone and heads", "heads that name their backbone"],
)
def test_each_kind_of_repository_loads_from_the_local_cache(
    filled_cache: Path, base_codes: torch.Tensor, source: str, more: dict[str, str]
) -> None:
    pipe = load(source, cache_dir=filled_cache, local_files_only=True, **more)
    assert isinstance(pipe.heads, SpatialDraftHeads)
    assert torch.equal(draw(pipe), base_codes)


# --- nothing of a folder is run or unpickled --------------------------------------------------------------------------


class _Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "sung")


def _plant_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **changes}))


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}], ids=["plain", "trust_remote_code"])
@pytest.mark.parametrize(
    ("file", "index"),
    [
        ("pipeline.py", {}),
        ("pipeline.py", {"_class_name": ["pipeline", "SpatialSpeculativePipeline"]}),
        ("heads/ssd_pipelines.py", {}),
        ("heads/other.py", {"heads": ["other", "SpatialDraftHeads"]}),
        ("verifier/ssd_pipelines.py", {}),
        ("backbone/transformers.py", {}),
    ],
    ids=["beside", "named as pipeline", "in heads", "named as component", "in verifier", "in backbone"],
)
def test_code_in_a_folder_is_never_run(
    saved: Path, tmp_path: Path, file: str, index: dict[str, Any], trust: dict[str, bool]
) -> None:
    folder, canary = tmp_path / "folder", tmp_path / "canary"
    shutil.copytree(saved, folder)
    code = f"open({str(canary)!r}, 'w').write('sung')\n"
    (folder / file).parent.mkdir(exist_ok=True)
    classes = "from ssd_pipelines import *\nfrom transformers import JanusForConditionalGeneration\n"
    (folder / file).write_text(code + classes)
    _plant_index(folder, **index)
    try:  # refusing such a folder is as good as ignoring its code
        load(folder, **trust)
    except (ValueError, OSError):
        pass
    assert not canary.exists()


def test_a_custom_pipeline_is_not_run(saved: Path, tmp_path: Path) -> None:
    folder, canary = tmp_path / "folder", tmp_path / "canary"
    shutil.copytree(saved, folder)
    (folder / "mine.py").write_text(f"open({str(canary)!r}, 'w').write('sung')\nfrom ssd_pipelines import *\n")
    with pytest.raises(ValueError, match="custom_pipeline|trust_remote_code"):
        load(folder, custom_pipeline="mine", trust_remote_code=True)
    assert not canary.exists()


def test_a_pickle_beside_safetensors_is_never_opened(saved: Path, base_codes: torch.Tensor, tmp_path: Path) -> None:
    folder, canary = tmp_path / "folder", tmp_path / "canary"
    shutil.copytree(saved, folder)
    for name in ("backbone/pytorch_model.bin", "heads/diffusion_pytorch_model.bin"):
        torch.save(_Canary(canary), folder / name)
    assert torch.equal(draw(load(folder)), base_codes)
    assert not canary.exists()


@pytest.mark.parametrize("part", ["backbone", "heads"])
def test_a_pickle_instead_of_safetensors_is_refused(saved: Path, tmp_path: Path, part: str) -> None:
    folder, pipe = tmp_path / "folder", tiny_pipeline()
    shutil.copytree(saved, folder)
    name = {"backbone": "model", "heads": "diffusion_pytorch_model"}[part]
    (folder / part / f"{name}.safetensors").unlink()
    pickled = {"backbone": "pytorch_model.bin", "heads": "diffusion_pytorch_model.bin"}[part]
    torch.save(getattr(pipe, part).state_dict(), folder / part / pickled)  # harmless, and refused all the same
    with pytest.raises(OSError, match="safetensors"):
        load(folder)


def test_pickled_heads_are_refused_by_every_loader(
    pipe: SpatialSpeculativePipeline, saved_backbone: Path, saved_heads: Path, tmp_path: Path
) -> None:
    shutil.copy(saved_heads / "config.json", tmp_path)
    torch.save(pipe.heads.state_dict(), tmp_path / "diffusion_pytorch_model.bin")
    heads = pipe.heads
    with pytest.raises(OSError, match="safetensors"):
        pipe.load_ssd_heads(tmp_path)
    assert pipe.heads is heads
    with pytest.raises(OSError, match="safetensors"):
        load(saved_backbone, heads=tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        SpatialDraftHeads.from_pretrained(tmp_path)


def test_saved_classes_name_their_public_path() -> None:
    for name in ("SpatialSpeculativePipeline", "SpatialDraftHeads", "SpatialDraftVerifier", "AutoregressiveVerifier"):
        saved_class = getattr(ssd_pipelines, name)
        assert saved_class.__module__ == "ssd_pipelines", "files have to be free to move without breaking saved folders"
