"""Shared parts of the commands: options, loading a pipeline, and the description of the machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console


if TYPE_CHECKING:
    from ssd_pipelines.pipeline import SpatialSpeculativePipeline


EMBEDDED = "embedded"

console = Console(highlight=False, soft_wrap=True)

Dtype = Literal["float32", "bfloat16", "float16"]
Model = Annotated[str, typer.Option("--model", "-m", help="Hub repository or folder, or the embedded model.")]
Heads = Annotated[str | None, typer.Option(help="Draft heads: Hub repository or folder. Default: the model's own.")]
Device = Annotated[str | None, typer.Option(help='Like "cpu", "cuda", "cuda:1" or "mps". Default: a GPU if present.')]
Precision = Annotated[Dtype | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")]


def load_pipeline(
    model: str, heads: str | None, device: str | None, dtype: Dtype | None
) -> "SpatialSpeculativePipeline":
    """Load the pipeline that the shared options describe, on its device.

    Raises:
        ValueError: if the device is unknown or not usable, or the model can't be loaded.
        OSError: if the model can't be found or downloaded.
    """
    import torch

    from ssd_pipelines.pipeline import SpatialSpeculativePipeline
    from ssd_pipelines.scenes import CHECKPOINT

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'`--device` must be like "cpu", "cuda" or "cuda:1", got {device!r}.') from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('`--device cuda` was given, but there is no usable GPU here: use "cpu".')
    if dtype is None:
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    with quiet_loading():
        pipe = SpatialSpeculativePipeline.from_pretrained(
            CHECKPOINT if model == EMBEDDED else model,
            dtype=getattr(torch, dtype),
            **({} if heads is None else {"heads": heads}),
        )
    return pipe.to(place)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Context manager that hides progress bars and notices of the libraries while a model loads, but not errors."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()


def machine(pipe: "SpatialSpeculativePipeline") -> str:
    """Return the device and the dtype of a pipeline as text."""
    from ssd_pipelines.evaluation.latency import describe_machine

    return describe_machine(pipe)


def escape(text: str) -> str:
    """Escape text so that rich does not read brackets as markup."""
    return text.replace("[", r"\[")
