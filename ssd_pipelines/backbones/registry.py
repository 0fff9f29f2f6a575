"""The adapter for each `config.model_type`; `register_backbone` adds others."""

from pathlib import PurePath
from typing import Any

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.emu3 import Emu3Backbone
from ssd_pipelines.backbones.janus import JanusBackbone
from ssd_pipelines.backbones.llamagen import LlamaGenBackbone
from ssd_pipelines.backbones.lumina import LuminaBackbone


# Of several adapters with one model type, the first that supports the config is used; the last registered is first.
_ADAPTERS: list[type[Backbone]] = [JanusBackbone, Emu3Backbone, LuminaBackbone, LlamaGenBackbone]

_JANUS = "deepseek-community/Janus-Pro-"
_EMU3 = "use BAAI/Emu3-Gen-hf"
_LUMINA = "Alpha-VLLM/Lumina-mGPT-7B-768"


def _use_instead(settings: dict[str, Any], name: str) -> str | None:
    """For known models that can't be loaded: the error text with what to load instead; `None` for all others.

    Several releases share a `model_type`, so the repository's name is used too if it is known.
    """
    model_type, lower = settings.get("model_type"), PurePath(name).name.lower()
    if model_type == "multi_modality":
        if "vision_gen_dec_config" in settings or "janusflow" in lower:
            return f"is JanusFlow, which draws by rectified flow and has no image tokens; use {_JANUS}1B or {_JANUS}7B"
        sizes = [size for size in ("1B", "7B") if f"pro-{size.lower()}" in lower] or ["1B", "7B"]
        same = "the same model" if len(sizes) == 1 else "the released successors"
        return (
            "is in the older format that needs the `janus` package; use "
            f"{' or '.join(_JANUS + size for size in sizes)}, {same} in transformers' format"
        )
    if model_type in ("Emu3", "emu3"):
        if "emu3.5" in lower:
            return f"is Emu3.5, whose layers and tokens are different; {_EMU3}"
        if "emu3-chat" in lower:
            return f"is Emu3-Chat, which reads pictures but draws none; {_EMU3}"
        if "stage1" in lower:
            return f"is from the middle of Emu3's training; {_EMU3}"
        if model_type == "Emu3":
            return f"is in the older format that needs code from its repository; {_EMU3}, the same model"
    if "lumina-mgpt-2.0" in lower:
        return f"is Lumina-mGPT 2.0, whose architecture and picture tokenizer are different; convert {_LUMINA} instead"
    return None


def register_backbone(adapter: type[Backbone]) -> type[Backbone]:
    """Register an adapter for its `model_type`; usable as a class decorator.

    Args:
        adapter: the subclass of [`Backbone`]; it comes before those registered earlier for the same `model_type`.

    Returns:
        `adapter` itself.

    Example:
        >>> @register_backbone
        ... class MyBackbone(Backbone):
        ...     model_type = "my_model"
    """
    _ADAPTERS.insert(0, adapter)
    return adapter


def adapter_class(config: Any, name: str = "The model") -> type[Backbone]:
    """The adapter class for a model.

    Args:
        config: the model's config, or its `config.json` as a dict.
        name: repository, folder or class name for the error message.

    Raises:
        ValueError: if there is none; the message says what to load instead if that is known.
    """
    settings = config if isinstance(config, dict) else vars(config)
    # A config object has its model type as a class attribute.
    model_type = settings.get("model_type") if isinstance(config, dict) else config.model_type
    instead = _use_instead({**settings, "model_type": model_type}, name)
    if instead is not None:
        raise ValueError(f"{name} {instead}.")
    of_type = [adapter for adapter in _ADAPTERS if adapter.model_type == model_type]
    for adapter in of_type:
        if adapter.serves(config):
            for architecture in (settings.get("architectures") or ()) if isinstance(config, dict) else ():
                if architecture in adapter.convert_first:
                    raise ValueError(f"{name} {adapter.convert_first[architecture]}.")
            return adapter
    if model_type == "chameleon":
        raise ValueError(
            f"{name} is a Chameleon, but no Lumina-mGPT: Meta's own draws nothing. Convert {_LUMINA} with "
            "`ssd-pipelines convert lumina-mgpt`, or add an adapter with `register_backbone`, as examples/backbones.md "
            "does for Anole."
        )
    raise ValueError(
        f"{name} has model type {model_type!r}, which no backbone adapter supports; known are "
        f"{', '.join(sorted({adapter.model_type for adapter in _ADAPTERS}))}. Others can be added with "
        "`register_backbone`."
    )


def wrap_backbone(model: Any, tokenizer: Any, image_tokenizer: Any = None, text_encoder: Any = None) -> Backbone:
    """Create the adapter for a loaded model and its tokenizer.

    Args:
        model: the transformers model.
        tokenizer: its tokenizer, or `None`.
        image_tokenizer, text_encoder: picture decoder and text encoder, if they are not part of the model.

    Raises:
        ValueError: if no adapter supports the model.
    """
    name = model.config.name_or_path or type(model).__name__
    return adapter_class(model.config, name)(model, tokenizer, image_tokenizer, text_encoder)
