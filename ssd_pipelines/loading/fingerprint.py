"""Check whether two models have the same weights, without reading all of them."""

import hashlib

import torch
from torch import nn


SAMPLE = 1024


def weights_fingerprint(model: nn.Module) -> str | None:
    """Compute a digest of a model's weights, without a download or a second copy; the order of tensors is irrelevant.

    It covers the name, the shape and `SAMPLE` evenly spaced values of every tensor, rounded to bfloat16. So a
    checkpoint has the same digest in float32 and bfloat16, and in one file or many; any training changes the digest.

    Args:
        model: the model.

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
