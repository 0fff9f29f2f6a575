"""Adapters that give families of autoregressive image models one interface."""

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.context import Context, Prompt
from ssd_pipelines.backbones.llamagen import LlamaGenConfig, LlamaGenModel
from ssd_pipelines.backbones.registry import adapter_class, register_backbone, wrap_backbone


__all__ = [
    "Backbone",
    "Context",
    "LlamaGenConfig",
    "LlamaGenModel",
    "Prompt",
    "adapter_class",
    "register_backbone",
    "wrap_backbone",
]
