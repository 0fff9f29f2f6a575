"""Which adapter serves which model: a closed table by `config.model_type`, open to `register_backbone`."""

from typing import Any

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.emu3 import Emu3Backbone
from ssd_pipelines.backbones.janus import JanusBackbone
from ssd_pipelines.backbones.llamagen import LlamaGenBackbone
from ssd_pipelines.backbones.lumina import LuminaBackbone


# Of several adapters of one model type the first that serves the config is taken, the latest registered before others.
_ADAPTERS: list[type[Backbone]] = [JanusBackbone, Emu3Backbone, LuminaBackbone, LlamaGenBackbone]

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
    _ADAPTERS.insert(0, adapter)
    return adapter


def adapter_class(config: Any, name: str = "The model") -> type[Backbone]:
    """The adapter for a model's config, or for its `config.json` as a dict.

    Raises:
        ValueError: if there is none, naming what to load instead where that is known.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    if model_type in _USE_INSTEAD:
        raise ValueError(f"{name} {_USE_INSTEAD[model_type]}.")
    of_type = [adapter for adapter in _ADAPTERS if adapter.model_type == model_type]
    for adapter in of_type:
        if adapter.serves(config):
            return adapter
    if of_type:
        families = ", ".join(adapter.__name__ for adapter in of_type)
        raise ValueError(
            f"{name} is of model type {model_type!r}, but its vocabulary lacks the special tokens of every family "
            f"known of it ({families}). Others can be added with `register_backbone`."
        )
    raise ValueError(
        f"{name} has model type {model_type!r}, which no backbone adapter serves; known are "
        f"{', '.join(sorted({adapter.model_type for adapter in _ADAPTERS}))}. Others can be added with "
        "`register_backbone`."
    )


def wrap_backbone(model: Any, tokenizer: Any, image_tokenizer: Any = None, text_encoder: Any = None) -> Backbone:
    """The adapter around a loaded model and its tokenizer, with picture decoder and text encoder if they are apart."""
    name = model.config.name_or_path or type(model).__name__
    return adapter_class(model.config, name)(model, tokenizer, image_tokenizer, text_encoder)
