"""Every family under offload hooks, device maps and quantisation: the same picture as without, and no dtype error.

Hooks fire for a module's forward, and decoding uses parts of a model outside of it: embeddings, the final norm, the
image head, the picture decoder, LlamaGen's learned caption. What can't be had without a second device is played by a
hook that leaves NaN behind until it is run.
"""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from ssd_pipelines import SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.testing import tiny_family


FAMILIES = ("janus", "emu3", "lumina", "llamagen")
PROMPTS = ["blue", "a photo of a red circle left of a green square"]


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def draw(pipe: SpatialSpeculativePipeline):
    pipe.verifier = SpatialDraftVerifier(rounds=1)
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    return pipe(PROMPTS, generator=generators, output_type="np")


def assert_draws_as(pipe: SpatialSpeculativePipeline, expected) -> None:
    for _ in range(2):  # the second time from wherever the first has left the weights
        output = draw(pipe)
        assert torch.equal(output.codes, expected.codes)
        torch.testing.assert_close(torch.from_numpy(output.images), torch.from_numpy(expected.images))


def models(pipe: SpatialSpeculativePipeline) -> list[nn.Module]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module) and name != "heads"}
    return list(parts.values())


class AwayUntilEntered(ModelHook):
    """Model offload without a second device: at rest the weights are NaN, running the hook brings them back.

    Like Diffusers' chain of hooks, entering one model sends the one before it away.
    """

    def __init__(self, before: "AwayUntilEntered | None") -> None:
        self.before = before

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.module = module
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}
        self.leave()
        return module

    def leave(self) -> None:
        with torch.no_grad():
            for value in self.module.state_dict().values():
                if value.is_floating_point():
                    value.fill_(float("nan"))

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.before is not None:
            self.before.leave()
        with torch.no_grad():
            for name, value in module.state_dict().items():
                value.copy_(self.weights[name])
        return args, kwargs


def test_every_part_is_entered_under_model_offload(family: str) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    before = None
    for name in pipe.model_cpu_offload_seq.split("->"):
        if isinstance(component := getattr(pipe, name), nn.Module):
            before = AwayUntilEntered(before)
            add_hook_to_module(component, before)
    assert_draws_as(pipe, expected)


def test_sequential_offload_draws_the_same(family: str) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    # What `enable_sequential_cpu_offload` does, which itself wants an accelerator.
    for model in models(pipe):
        cpu_offload(model, torch.device("cpu"))
    assert all(parameter.is_meta for model in models(pipe) for parameter in model.parameters())
    assert_draws_as(pipe, expected)
    assert all(parameter.is_meta for model in models(pipe) for parameter in model.parameters())


def test_offload_to_disk_draws_the_same(family: str, tmp_path) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    for k, model in enumerate(models(pipe)):
        disk_offload(model, tmp_path / str(k), execution_device=torch.device("cpu"), offload_buffers=True)
    assert_draws_as(pipe, expected)


def test_sequential_offload_of_a_bfloat16_model_draws_without_a_dtype_error(family: str) -> None:
    pipe = tiny_family(family)
    pipe.to(torch.bfloat16)
    expected = draw(pipe)
    for model in models(pipe):
        cpu_offload(model, torch.device("cpu"))
    output = draw(pipe)
    assert torch.equal(output.codes, expected.codes)
    # A layer at a time, the picture decoder runs in its own dtype: rounding of bfloat16, no other picture.
    assert abs(output.images - expected.images).mean() < 0.01


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_group_offload_draws_the_same(family: str, offload_type: str) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    # Diffusers refuses it for the class of the separate picture decoder.
    options: dict[str, Any] = {"exclude_modules": ["image_tokenizer"]} if pipe.image_tokenizer is not None else {}
    options |= {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
    pipe.enable_group_offload(onload_device=torch.device("cpu"), offload_type=offload_type, **options)
    assert_draws_as(pipe, expected)
