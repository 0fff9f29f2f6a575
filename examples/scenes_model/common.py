"""Shared code of the training scripts: gradient averaging over processes, atomic checkpoints, model configuration."""

import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import JanusConfig, JanusVisionConfig, JanusVQVAEConfig, LlamaConfig

from ssd_pipelines.scenes import IMAGE_SIZE


PATCH_SIZE = 4
GRID_SIDE = IMAGE_SIZE // PATCH_SIZE
NUM_CODES = 512


def rotary_base(head_size: int, pair: int = 2) -> float:
    """Return the rotary embedding base that makes one pair of channels turn exactly once per row of the grid.

    The distance to <begin_of_image> then gives the column in the same way in every row, and the token above is easy to
    attend to.

    Args:
        head_size: channels of an attention head.
        pair: index of the pair of channels.
    """
    return (GRID_SIDE / (2 * math.pi)) ** (head_size / (2 * pair))


def model_config(
    vocab_size: int = 128,
    hidden_size: int = 160,
    layers: int = 5,
    heads: int = 4,
    intermediate_size: int = 432,
    **special: int,
) -> JanusConfig:
    """Return the configuration of the whole model.

    The vision tower is as small as possible, because image generation never uses it. `special` takes the token ids
    `bos_token_id`, `eos_token_id`, `pad_token_id` and `image_token_id`.
    """
    return JanusConfig(
        text_config=LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": rotary_base(hidden_size // heads)},
            tie_word_embeddings=True,
            **{key: special[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in special},
        ),
        vision_config=JanusVisionConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            mlp_ratio=1.0,
            image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE,
            projection_dim=hidden_size,
            depth=1,
            num_image_tokens=GRID_SIDE**2,
        ),
        vq_config=JanusVQVAEConfig(
            embed_dim=8,
            num_embeddings=NUM_CODES,
            latent_channels=64,
            base_channels=64,
            channel_multiplier=[1, 1, 2],
            num_res_blocks=1,
            num_patches=GRID_SIDE,
            projection_dim=hidden_size,
            image_token_embed_dim=hidden_size,
        ),
        image_token_id=special.get("image_token_id", 0),
        tie_word_embeddings=True,
    )


def start_processes() -> tuple[int, int]:
    """Join the process group if `torchrun` started several processes, and return the rank and the number of processes.

    Each process uses one thread: when anything else runs on the machine, two such processes lose far less speed than
    one process with two threads.
    """
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def average_(tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors in place by their mean over all processes, with one all-reduce."""
    if not dist.is_initialized():
        return
    tensors = list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically, so that a killed run never leaves a partial file."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def to_pixels(images: Iterable[np.ndarray]) -> torch.Tensor:
    """Convert `uint8 (64, 64, 3)` arrays to a `float32 (batch, 3, 64, 64)` tensor in [-1, 1]."""
    stacked = torch.from_numpy(np.stack(list(images)))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_images(pixels: torch.Tensor) -> np.ndarray:
    """Convert a `(batch, 3, 64, 64)` tensor in [-1, 1] to a `uint8 (batch, 64, 64, 3)` array."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def seeded(*parts: int | str) -> Random:
    """Return a generator seeded by `parts` only, so that a resumed run sees the same data as an uninterrupted one."""
    return Random(" ".join(map(str, parts)))


class Clock:
    """Tracks the progress, from 0 to 1, of a run with a fixed budget of minutes over all its restarts.

    Args:
        minutes: the budget.
        elapsed: seconds that the run has used before this restart.
    """

    def __init__(self, minutes: float, elapsed: float = 0.0) -> None:
        self.budget, self.before, self.start = minutes * 60, elapsed, time.time()

    @property
    def elapsed(self) -> float:
        """Seconds that the run has used, restarts included."""
        return self.before + time.time() - self.start

    @property
    def progress(self) -> float:
        """Used share of the budget, at most 1."""
        return min(self.elapsed / self.budget, 1.0)

    def shared_progress(self) -> float:
        """Return the progress of the process with rank 0, so that all processes take the same decisions."""
        value = torch.tensor(self.progress, dtype=torch.float64)
        if dist.is_initialized():
            dist.broadcast(value, 0)
        return float(value)
