"""Telling whether two models have the same weights, without reading all of them."""

import hashlib

import torch
from torch import nn


SAMPLE = 1024


def weights_fingerprint(model: nn.Module) -> str | None:
    """A digest of a model's weights that needs no download, no second copy and no particular order.

    It covers the name, the shape and `SAMPLE` evenly spaced values of every tensor, rounded to bfloat16: so it is the
    same for one checkpoint loaded in float32 or bfloat16, from one file or many, and another after any training.

    Returns:
        hexadecimal sha256, or `None` if some weights aren't in memory (offloaded).

    Example:
        >>> weights_fingerprint(torch.nn.Linear(2, 2)) == weights_fingerprint(torch.nn.Linear(2, 2))
        False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            return None
        flat = tensor.detach().flatten()
        values = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]
        if values.is_floating_point():
            values = values.to(torch.bfloat16)
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
