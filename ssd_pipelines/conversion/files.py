"""Read published checkpoints; a file with the wrong content gives an error of one sentence.

This is the only place where pickles are opened, by `torch.load(weights_only=True)`, which runs none of their code.
"""

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn


def load_pickled_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read the tensors of a `.ckpt` or `.pt` file by name, without running any of its code.

    Raises:
        ValueError: if it holds anything other than tensors and plain values, or no tensors at all.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: give the path of the downloaded checkpoint.")
    # Training scripts save their parsed arguments with the tensors: plain values in a plain object.
    with reading(path, "as plain tensors"), torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    named = content.items() if isinstance(content, dict) else ()
    tensors = {name: value for name, value in named if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"{path} contains no named tensors: give the path of the downloaded checkpoint.")
    return tensors


@contextmanager
def reading(source: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Context manager that replaces any error that a library raises while reading a file by one sentence.

    Args:
        source: the file, for the message.
        kind: what it is read as, like "as safetensors".

    Raises:
        ValueError: for any exception inside.
    """
    try:
        yield
    except Exception as error:
        reason = re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".:") or type(error).__name__
        raise ValueError(
            f"{source} can't be read {kind} ({reason}): download it again, completely and not as a git-lfs pointer."
        ) from error


def shape_of(tensors: dict[str, torch.Tensor], name: str, dimensions: int, source: str) -> torch.Size:
    """Return the shape of a tensor from which sizes of the model are read.

    Raises:
        ValueError: if the tensor is missing or has another number of dimensions than `dimensions`.
    """
    if name not in tensors or tensors[name].ndim != dimensions:
        found = f"has {name} of shape {tuple(tensors[name].shape)}" if name in tensors else f"lacks {name}"
        raise ValueError(f"{source} {found}, so the sizes of the model are unknown: download it again.")
    return tensors[name].shape


def load_whole(model: nn.Module, tensors: dict[str, torch.Tensor], source: str) -> None:
    """Load tensors into a model; a model on the meta device takes them over without a copy.

    Raises:
        ValueError: if tensors are missing, left over or of another shape; the message names them.
    """
    expected = model.state_dict()
    shared = [name for name in expected if name in tensors and tensors[name].shape != expected[name].shape]
    shapes = [f"{name} of shape {tuple(tensors[name].shape)}, not {tuple(expected[name].shape)}" for name in shared]
    faults = {
        "lacks {}": [name for name in expected if name not in tensors],
        "has the unexpected {}": [name for name in tensors if name not in expected],
        "has {}": shapes,
    }
    found = [fault.format(some(names)) for fault, names in faults.items() if names]
    if found:
        raise ValueError(f"{source} {' and '.join(found)}: download it again.")
    model.load_state_dict(tensors, assign=any(value.is_meta for value in expected.values()))


def some(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
