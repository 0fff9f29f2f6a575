"""Every family under offload hooks, device maps and quantisation: the same picture as without, and no dtype error.

Hooks fire for a module's forward, and decoding uses parts of a model outside of it: embeddings, the final norm, the
image head, the picture decoder, LlamaGen's learned caption. Without a second device offload moves nothing, so here it
takes the weights away altogether until its hook has run.
"""

from collections.abc import Iterable
from typing import Any

import accelerate.big_modeling
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import CpuOffload
from diffusers.hooks.group_offloading import ModuleGroup
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


def send_away(tensors: Iterable[torch.Tensor]) -> None:
    """What moving weights home does, without a second device: they lie on "meta", where nothing computes."""
    for tensor in tensors:
        if not tensor.is_meta:
            content = nn.Parameter(tensor.to("meta"), requires_grad=False)
            torch.utils.swap_tensors(tensor, content)
            tensor.content = content


def bring_back(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_meta:
            torch.utils.swap_tensors(tensor, tensor.content)


def tensors_of(*modules: nn.Module) -> list[torch.Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


class AwayUntilEntered(CpuOffload):
    """The hook of model offload, which does nothing where both devices are the CPU."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        send_away(tensors_of(module))
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        bring_back(tensors_of(module))
        return args, kwargs

    def detach_hook(self, module: nn.Module) -> nn.Module:
        bring_back(tensors_of(module))
        return module


@pytest.fixture
def second_device(monkeypatch) -> None:
    """Model and group offload to the CPU take weights away, as they do from a GPU."""

    def tensors(group: ModuleGroup) -> list[torch.Tensor]:
        return [*tensors_of(*group.modules), *group.parameters, *group.buffers]

    monkeypatch.setattr(accelerate.big_modeling, "CpuOffload", AwayUntilEntered)
    monkeypatch.setattr(ModuleGroup, "onload_", lambda group: bring_back(tensors(group)))
    monkeypatch.setattr(ModuleGroup, "offload_", lambda group: send_away(tensors(group)))


def all_away(*models: nn.Module) -> bool:
    return all(parameter.is_meta for model in models for parameter in model.parameters())


@pytest.mark.usefixtures("second_device")
def test_every_part_is_entered_under_model_offload_twice_and_in_a_second_pipeline(family: str) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    for _ in range(2):
        pipe.enable_model_cpu_offload(device="cpu")
        assert all_away(*models(pipe))
        assert_draws_as(pipe, expected)
        assert all_away(*models(pipe))
    other = SpatialSpeculativePipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    assert_draws_as(other, expected)


def test_sequential_offload_draws_the_same(family: str) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    # What `enable_sequential_cpu_offload` does, which itself wants an accelerator.
    for model in models(pipe):
        cpu_offload(model, torch.device("cpu"))
    assert all_away(*models(pipe))
    assert_draws_as(pipe, expected)
    assert all_away(*models(pipe))


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


@pytest.mark.usefixtures("second_device")
@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_group_offload_draws_the_same(family: str, offload_type: str) -> None:
    pipe = tiny_family(family)
    expected = draw(pipe)
    # Diffusers refuses it for the class of the separate picture decoder.
    options: dict[str, Any] = {"exclude_modules": ["image_tokenizer"]} if pipe.image_tokenizer is not None else {}
    options |= {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
    pipe.enable_group_offload(onload_device=torch.device("cpu"), offload_type=offload_type, **options)
    assert all_away(*(model for model in models(pipe) if model is not pipe.image_tokenizer))
    assert pipe.adapter().device == torch.device("cpu")
    assert_draws_as(pipe, expected)


@pytest.mark.parametrize("away", [(), ("model.text_model", "model.vqmodel")], ids=["nothing", "text and picture"])
def test_a_backbone_under_a_device_map_draws_the_same(away: tuple[str, ...], tmp_path) -> None:
    pipe = tiny_family("emu3")
    expected = draw(pipe)
    pipe.backbone.save_pretrained(tmp_path / "emu3")
    pipe.tokenizer.save_pretrained(tmp_path / "emu3")
    places = {"lm_head": "cpu", **dict.fromkeys(away, "disk")}
    mapped = SpatialSpeculativePipeline.from_pretrained(
        tmp_path / "emu3", heads=pipe.heads, device_map=places if away else "auto", offload_folder=tmp_path / "disk"
    )
    mapped.set_progress_bar_config(disable=True)
    assert any(parameter.is_meta for parameter in mapped.backbone.parameters()) == bool(away)
    assert_draws_as(mapped, expected)


def test_a_saved_pipeline_under_a_device_map_draws_the_same(tmp_path) -> None:
    pipe = tiny_family("llamagen")
    expected = draw(pipe)
    pipe.save_pretrained(tmp_path)
    mapped = SpatialSpeculativePipeline.from_pretrained(tmp_path, device_map="cpu")
    mapped.set_progress_bar_config(disable=True)
    assert mapped.hf_device_map == "cpu"
    assert_draws_as(mapped, expected)
