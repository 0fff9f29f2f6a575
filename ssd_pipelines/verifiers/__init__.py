"""Decoding algorithms, swapped like schedulers, and the parts that rolling decoders are made of; one per file."""

from ssd_pipelines.verifiers.autoregressive import AutoregressiveVerifier
from ssd_pipelines.verifiers.base import Verifier
from ssd_pipelines.verifiers.jacobi import JacobiVerifier
from ssd_pipelines.verifiers.registry import verifier_from_config
from ssd_pipelines.verifiers.spatial_draft import SpatialDraftVerifier
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.wavefront import WavefrontVerifier


__all__ = [
    "AutoregressiveVerifier",
    "DecodingState",
    "JacobiVerifier",
    "SpatialDraftVerifier",
    "Verifier",
    "WavefrontVerifier",
    "verifier_from_config",
]
