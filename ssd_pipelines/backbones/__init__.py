"""Families of autoregressive image models behind one contract."""

from ssd_pipelines.backbones.base import Backbone, Context, Prompt
from ssd_pipelines.backbones.registry import adapter_class, register_backbone, wrap_backbone


__all__ = ["Backbone", "Context", "Prompt", "adapter_class", "register_backbone", "wrap_backbone"]
