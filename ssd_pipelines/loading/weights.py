"""Reject models whose checkpoint lacks tensors: Diffusers and transformers only log this and use random numbers."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ssd_pipelines.backbones import adapter_class
from ssd_pipelines.hub import stored_shapes


PARTS = ("backbone", "image_tokenizer", "text_encoder")


def check_nothing_is_missing(missing: Iterable[str], unused: tuple[str, ...], source: str) -> None:
    """Raise an error if tensors that image generation needs were not loaded.

    Args:
        missing: names of the tensors that were not loaded.
        unused: prefixes of the names of tensors that image generation doesn't need.
        source: the folder or repository, for the message.

    Raises:
        ValueError: if a needed tensor is missing; the message names one.
    """
    needed = sorted(name for name in missing if not name.startswith(unused))
    if needed:
        others = f" and {len(needed) - 1} more" if len(needed) > 1 else ""
        raise ValueError(
            f"The weights in {source} lack {needed[0]}{others}, which would be random numbers: download or convert the "
            "model again."
        )


def check_saved_parts(pipe: Any, folder: str | os.PathLike[str], given: Iterable[str]) -> None:
    """Raise an error if the files of a saved pipeline lack tensors of one of its `PARTS`.

    A tensor is identified by its shape and the last two parts of its name, because library versions change the parts
    before them.

    Args:
        pipe: the pipeline.
        folder: the folder that it was loaded from.
        given: names of components that did not come from the folder.

    Raises:
        ValueError: see `check_nothing_is_missing`.
    """
    for name in PARTS:
        part, files = getattr(pipe, name), sorted((Path(folder) / name).glob("*.safetensors"))
        if part is None or name in given or not files or getattr(part.config, "quantization_config", None) is not None:
            continue
        stored: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for file in files:
            stored.update((_ending(key), shape) for key, shape in stored_shapes(file).items())
        missing = set()
        for key, tensor in part.state_dict().items():
            entry = _ending(key), tuple(tensor.shape)
            stored[entry] -= 1
            if stored[entry] < 0:
                missing.add(key)
        # Of two tied tensors, only one is stored.
        for one, other in (getattr(part, "all_tied_weights_keys", None) or {}).items():
            if not {one, other} <= missing:
                missing -= {one, other}
        unused = adapter_class(part.config).unused_parts if name == "backbone" else ()
        check_nothing_is_missing(missing, unused, os.path.join(folder, name))


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])
