"""The models that the page offers: loaded once, shared by all visitors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from ssd_pipelines.evaluation.latency import describe_machine
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.scenes import CHECKPOINT, COLOURS, SHAPES, parse_prompt


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class DemoModel:
    """A model on the page.

    Args:
        name: shown on the page.
        pipe: loaded, with heads or without.
        machine: what it runs on, in words.
        hint: what it can draw.
        examples: prompts to start with.
        prompt_error: says what is wrong with a prompt, for a model that only knows some words; else `None`.
    """

    name: str
    pipe: SpatialSpeculativePipeline
    machine: str
    hint: str
    examples: tuple[str, ...]
    prompt_error: Callable[[str], str | None] = lambda prompt: None

    def view(self) -> SpatialSpeculativePipeline:
        """A pipeline of its own for one visitor's call; the weights are shared."""
        pipe = SpatialSpeculativePipeline.from_pipe(self.pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe


def load_model(
    model: str | None = None, heads: str | None = None, device: str | None = None, dtype: torch.dtype | None = None
) -> DemoModel:
    """Load a model for the page.

    Args:
        model: Hub repository or folder; by default the embedded model.
        heads: Hub repository or folder; by default those that come with the model.
        device: by default a CUDA device or MPS if there is one, else the CPU.
        dtype: by default `bfloat16` where the device has it, `float16` on other CUDA devices, `float32` on a CPU.

    Raises:
        ValueError, OSError: as `SpatialSpeculativePipeline.from_pretrained`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if dtype is None:
        dtype = _default_dtype(torch.device(device))
    pipe = SpatialSpeculativePipeline.from_pretrained(
        CHECKPOINT if model is None else model, dtype=dtype, **({} if heads is None else {"heads": heads})
    ).to(device)
    pipe.set_progress_bar_config(disable=True)
    machine = describe_machine(pipe)
    if model is None:
        return DemoModel(
            "Scenes (embedded, 1.7 M parameters)",
            pipe,
            machine,
            f"It draws {', '.join(SHAPES)} in {', '.join(COLOURS)}, up to four of them, on 64 x 64 pixels.",
            (
                "a red circle and a blue square",
                "three squares",
                "a ring above a cross",
                "a purple cross and a yellow ring",
            ),
            _scene_error,
        )
    return DemoModel(
        model,
        pipe,
        machine,
        "" if pipe.heads is not None else "No draft heads are loaded: only decoders without heads are offered.",
        ("a red fox in the snow", "a glass teapot on a wooden table, morning light"),
    )


def on_gpu(seconds: int) -> Callable[[Function], Function]:
    """Mark a function that needs the GPU of a ZeroGPU Space for at most so many seconds; elsewhere nothing changes."""

    def decorate(function: Function) -> Function:
        try:
            import spaces
        except ImportError:
            return function
        return wraps(function)(spaces.GPU(duration=seconds)(function))  # type: ignore[return-value]

    return decorate


def _default_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.float32 if device.type == "cpu" else torch.float16


def _scene_error(prompt: str) -> str | None:
    try:
        parse_prompt(prompt)
    except ValueError as error:
        return str(error)
    return None
