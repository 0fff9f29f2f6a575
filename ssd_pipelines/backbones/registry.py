"""Which adapter serves which model: a closed table by `config.model_type`, open to `register_backbone`."""

from typing import Any

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.emu3 import Emu3Backbone
from ssd_pipelines.backbones.janus import JanusBackbone


_ADAPTERS: dict[str, type[Backbone]] = {adapter.model_type: adapter for adapter in (JanusBackbone, Emu3Backbone)}

_USE_INSTEAD = {
    "multi_modality": (
        "is in the older format that needs the `janus` package; use the same model in transformers' format, "
        "deepseek-community/Janus-Pro-1B or deepseek-community/Janus-Pro-7B"
    ),
    "Emu3": "is in the older format that runs code of its repository; use BAAI/Emu3-Gen-hf, the same model",
}


def register_backbone(adapter: type[Backbone]) -> type[Backbone]:
    """Make an adapter known under its `model_type`; usable as a class decorator.

    Example:
        >>> @register_backbone
        ... class MyBackbone(Backbone):
        ...     model_type = "my_model"
    """
    _ADAPTERS[adapter.model_type] = adapter
    return adapter


def adapter_class(model_type: str | None, name: str = "The model") -> type[Backbone]:
    """The adapter for a `model_type`.

    Raises:
        ValueError: if there is none, naming what to load instead where that is known.
    """
    if model_type in _USE_INSTEAD:
        raise ValueError(f"{name} {_USE_INSTEAD[model_type]}.")
    if model_type not in _ADAPTERS:
        raise ValueError(
            f"{name} has model type {model_type!r}, which no backbone adapter serves; known are "
            f"{', '.join(sorted(_ADAPTERS))}. Others can be added with `register_backbone`."
        )
    return _ADAPTERS[model_type]


def wrap_backbone(model: Any, tokenizer: Any) -> Backbone:
    """The adapter around a loaded transformers model and its tokenizer."""
    name = model.config.name_or_path or type(model).__name__
    return adapter_class(model.config.model_type, name)(model, tokenizer)
