"""Spatially speculative decoding for autoregressive image models, as a Diffusers pipeline."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssd_pipelines.resources import package_version


if TYPE_CHECKING:
    from ssd_pipelines import scenes
    from ssd_pipelines.backbones import Backbone, LlamaGenConfig, LlamaGenModel, Prompt, register_backbone
    from ssd_pipelines.grid import TokenGrid
    from ssd_pipelines.heads import SpatialDraftHeads
    from ssd_pipelines.pipeline import SpatialSpeculativePipeline
    from ssd_pipelines.pipeline_output import DecodingStats, SpatialSpeculativePipelineOutput
    from ssd_pipelines.verifiers import (
        AutoregressiveVerifier,
        JacobiVerifier,
        SpatialDraftVerifier,
        Verifier,
        WavefrontVerifier,
    )

# torch, transformers and diffusers take seconds to import. A module is imported when one of its names is first used, so
# that `ssd-pipelines --help` answers immediately.
_MODULES = {
    "AutoregressiveVerifier": "verifiers",
    "Backbone": "backbones",
    "DecodingStats": "pipeline_output",
    "JacobiVerifier": "verifiers",
    "LlamaGenConfig": "backbones",
    "LlamaGenModel": "backbones",
    "Prompt": "backbones",
    "SpatialDraftHeads": "publishing",  # this module adds `push_to_hub` to the class
    "SpatialDraftVerifier": "verifiers",
    "SpatialSpeculativePipeline": "pipeline",
    "SpatialSpeculativePipelineOutput": "pipeline_output",
    "TokenGrid": "grid",
    "Verifier": "verifiers",
    "WavefrontVerifier": "verifiers",
    "register_backbone": "backbones",
}

__all__ = [
    "AutoregressiveVerifier",
    "Backbone",
    "DecodingStats",
    "JacobiVerifier",
    "LlamaGenConfig",
    "LlamaGenModel",
    "Prompt",
    "SpatialDraftHeads",
    "SpatialDraftVerifier",
    "SpatialSpeculativePipeline",
    "SpatialSpeculativePipelineOutput",
    "TokenGrid",
    "Verifier",
    "WavefrontVerifier",
    "register_backbone",
    "scenes",
]


def __getattr__(name: str) -> Any:
    if name == "scenes":
        return import_module("ssd_pipelines.scenes")
    if name == "__version__":
        return package_version()
    if name in ("ModelMixin", "SchedulerMixin"):
        # `model_index.json` lists heads and verifier under this package. Diffusers then looks up the base class here to
        # know how to load them.
        return getattr(import_module("diffusers"), name)
    if name == "PreTrainedModel":
        return import_module("transformers").PreTrainedModel
    if name in _MODULES:
        return getattr(import_module(f"ssd_pipelines.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'ssd_pipelines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
