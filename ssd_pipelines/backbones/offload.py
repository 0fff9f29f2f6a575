"""Using parts of a model outside of its forward, wherever hooks and device maps have put its weights."""

from typing import Any

import torch
from torch import nn


def enter(module: nn.Module) -> None:
    """Run the offload hook of a module, which fires on its own only for its forward, before its parts are used."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        hook.pre_forward(module)
    group = _group_offload_hook(module)
    if group is not None:
        group.pre_forward(module)


def offload_device(model: nn.Module) -> torch.device | None:
    """Where a model under offload hooks computes; `None` without any."""
    # Every call of the pipeline asks. `model.modules()` and `getattr` would take milliseconds to find nothing.
    modules = [model]
    while modules:
        module = modules.pop()
        modules += [child for child in reversed(module._modules.values()) if child is not None]
        hook = vars(module).get("_hf_hook")
        for single in getattr(hook, "hooks", (hook,)):  # several hooks on one module are kept as one
            device = getattr(single, "execution_device", None)
            if device is not None:
                return torch.device(device)
        group = _group_offload_hook(module)
        if group is not None:
            return torch.device(group.config.onload_device)
    return None


def _group_offload_hook(module: nn.Module) -> Any:
    """The hook of Diffusers' `enable_group_offload` on this very module, or `None`."""
    registry = vars(module).get("_diffusers_hook")
    return None if registry is None else registry.get_hook("group_offloading")


def in_float32(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Run a module in float32 whatever its weights' dtype; the module stays as it is.

    Picture decoders differ visibly in bfloat16. A float32 copy of the weights lives for the moment of the call, on the
    device of the inputs; weights that an offload hook will bring in, a layer at a time, can't be copied here and run as
    they are.
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
    # Quantised weights of torchao and quanto are tensors of their own classes, not all of which can change their dtype.
    plain = type(value) in (torch.Tensor, nn.Parameter)
    return (value if plain else value.dequantize()).to(device, torch.float32)
