"""Helpers to use parts of a model outside of its forward, if offload hooks or device maps have moved its weights."""

from typing import Any

import torch
from torch import nn


def enter(module: nn.Module) -> None:
    """Run a module's offload hook before its parts are used; otherwise the hook runs only for the module's forward."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        hook.pre_forward(module)
    group = _group_offload_hook(module)
    if group is not None:
        group.pre_forward(module)


def offload_device(model: nn.Module) -> torch.device | None:
    """The device that a model with offload hooks computes on; `None` without such hooks."""
    # Every pipeline call runs this. `model.modules()` and `getattr` would take milliseconds to find nothing.
    modules = [model]
    while modules:
        module = modules.pop()
        modules += [child for child in reversed(module._modules.values()) if child is not None]
        hook = vars(module).get("_hf_hook")
        for single in getattr(hook, "hooks", (hook,)):  # several hooks on one module are wrapped in one
            device = getattr(single, "execution_device", None)
            if device is not None:
                return torch.device(device)
        group = _group_offload_hook(module)
        if group is not None:
            return torch.device(group.config.onload_device)
    return None


def _group_offload_hook(module: nn.Module) -> Any:
    """The hook of Diffusers' `enable_group_offload` on this module itself, or `None`."""
    registry = vars(module).get("_diffusers_hook")
    return None if registry is None else registry.get_hook("group_offloading")


def in_float32(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Run a module in float32 regardless of the dtype of its weights; the module is not changed.

    Picture decoders give visibly different results in bfloat16. During the call, a float32 copy of the weights exists
    on the device of the inputs. Weights that an offload hook loads layer by layer can't be copied here, so they run in
    their own dtype.

    Args:
        module: returns one tensor.
        inputs: positional arguments of its forward.

    Returns:
        `float32` tensor on the device of the first input.
    """
    device = inputs[0].device
    weights = dict(module.named_parameters())
    whole = not any(weight.is_meta for weight in weights.values())
    if whole and any(weight.dtype != torch.float32 for weight in weights.values()):
        tensors = {**weights, **dict(module.named_buffers())}
        copies = {name: _float32(value, device) for name, value in tensors.items()}
        return torch.func.functional_call(module, copies, inputs)
    if whole:  # a device map may have put the module elsewhere
        inputs = tuple(value.to(next(iter(weights.values())).device) for value in inputs)
    return module(*inputs).to(device, torch.float32)


def _float32(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not value.is_floating_point():
        return value.to(device)
    # Quantised weights of torchao and quanto have their own tensor classes, and not all of them can change their dtype.
    plain = type(value) in (torch.Tensor, nn.Parameter)
    return (value if plain else value.dequantize()).to(device, torch.float32)
