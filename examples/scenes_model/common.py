"""What the training scripts share: processes that average gradients, atomic checkpoints, the model's configuration."""

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
    """The base of the rotary embedding that makes one pair of channels turn exactly once a row of the grid.

    So the distance to <begin_of_image> tells the column in every row alike, and the token above is an easy target.
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
    """The configuration of the whole model; the vision tower, which drawing never uses, is as small as it can be."""
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
    """Joins the other processes if `torchrun` started several; returns this one's rank and their number.

    One thread each: two such processes lose far less than one process of two threads when anything else runs.
    """
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def average_(tensors: Iterable[torch.Tensor]) -> None:
    """Replaces tensors by their mean over all processes, in one message."""
    if not dist.is_initialized():
        return
    tensors = list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint that is either whole or not there: a killed run never leaves half a file."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def to_pixels(images: Iterable[np.ndarray]) -> torch.Tensor:
    """(64, 64, 3) uint8 arrays -> (B, 3, 64, 64) in [-1, 1]."""
    stacked = torch.from_numpy(np.stack(list(images)))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_images(pixels: torch.Tensor) -> np.ndarray:
    """(B, 3, 64, 64) in [-1, 1] -> (B, 64, 64, 3) uint8."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def seeded(*parts: int | str) -> Random:
    """A generator that depends on nothing but these: the data of a resumed run are those of an unbroken one."""
    return Random(" ".join(map(str, parts)))


class Clock:
    """Progress from 0 to 1 of a run that gets a fixed number of minutes, counted over all its restarts."""

    def __init__(self, minutes: float, elapsed: float = 0.0) -> None:
        self.budget, self.before, self.start = minutes * 60, elapsed, time.time()

    @property
    def elapsed(self) -> float:
        return self.before + time.time() - self.start

    @property
    def progress(self) -> float:
        return min(self.elapsed / self.budget, 1.0)

    def shared_progress(self) -> float:
        """The first process's progress, so that all take the same decisions."""
        value = torch.tensor(self.progress, dtype=torch.float64)
        if dist.is_initialized():
            dist.broadcast(value, 0)
        return float(value)
