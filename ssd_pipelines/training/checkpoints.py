"""Checkpoints of a training run, in safetensors only, so that resuming does not open a pickle."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ssd_pipelines.heads import SpatialDraftHeads


CHECKPOINT = "checkpoint/state.safetensors"
"""Path within the output folder. It is in its own subfolder because it is not published with the heads."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    folder: Path, heads: SpatialDraftHeads, optimizer: torch.optim.Optimizer, step: int, course: dict[str, Any]
) -> None:
    """Save the heads' weights and the optimizer state; if it is interrupted, the previous checkpoint stays.

    Args:
        folder: output folder of the run.
        heads: the heads.
        optimizer: their optimizer.
        step: number of steps done.
        course: settings and data of the run; `load_checkpoint` compares them.
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
    """Load the heads' weights and the optimizer state from the last checkpoint, if there is one.

    Args:
        folder: output folder of the run.
        heads: the heads to load into.
        optimizer: their optimizer.
        course: settings and data of this run.

    Returns:
        the number of steps done; 0 without a checkpoint.

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
            f"{folder} holds a run of other settings or data ({'; '.join(different)}): give the same ones, or an "
            "empty folder."
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
