"""Checkpoints of a training run: safetensors only, so that resuming opens no pickle."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ssd_pipelines.heads import SpatialDraftHeads


CHECKPOINT = "checkpoint/state.safetensors"
"""Beside the finished heads, in a folder of its own: it isn't part of what is published."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    folder: Path, heads: SpatialDraftHeads, optimizer: torch.optim.Optimizer, step: int, course: dict[str, Any]
) -> None:
    """Write weights and optimizer after `step` steps; a run that is killed meanwhile finds the one before.

    Args:
        course: settings and data that this run belongs to.
    """
    tensors = {f"heads.{name}": tensor for name, tensor in heads.state_dict().items()}
    for name, parameter in heads.named_parameters():
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{key}.{name}": state[key] for key in _MOMENTS if key in state}
    path = folder / CHECKPOINT
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step), "course": json.dumps(course)})
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_checkpoint(
    folder: Path, heads: SpatialDraftHeads, optimizer: torch.optim.Optimizer, course: dict[str, Any]
) -> int:
    """Bring weights and optimizer to where the last checkpoint left them.

    Returns:
        the number of steps made; 0 without a checkpoint.

    Raises:
        ValueError: if the checkpoint belongs to other settings or data.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    theirs = json.loads(metadata["course"])
    different = [
        f"{name} {theirs.get(name)} there, {course.get(name)} here"
        for name in sorted({*theirs, *course})
        if theirs.get(name) != course.get(name)
    ]
    if different:
        raise ValueError(
            f"{folder} holds a run of other settings or data ({'; '.join(different)}): give the same, or an empty "
            "folder."
        )
    tensors = load_file(path)
    heads.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("heads.")})
    for name, parameter in heads.named_parameters():
        if f"step.{name}" in tensors:
            state = {key: tensors[f"{key}.{name}"] for key in _MOMENTS}
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
            }
    return int(metadata["step"])
