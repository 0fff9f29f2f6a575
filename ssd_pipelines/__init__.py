"""Spatially speculative decoding for autoregressive image models, as a Diffusers pipeline."""

from importlib.metadata import PackageNotFoundError, version

from ssd_pipelines import scenes
from ssd_pipelines.backbones import Backbone, Prompt, register_backbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.pipeline_output import DecodingStats, SpatialSpeculativePipelineOutput
from ssd_pipelines.verifiers import AutoregressiveVerifier, SpatialDraftVerifier, Verifier


try:
    __version__ = version("ssd-pipelines")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "AutoregressiveVerifier",
    "Backbone",
    "DecodingStats",
    "Prompt",
    "SpatialDraftHeads",
    "SpatialDraftVerifier",
    "SpatialSpeculativePipeline",
    "SpatialSpeculativePipelineOutput",
    "TokenGrid",
    "Verifier",
    "register_backbone",
    "scenes",
]
