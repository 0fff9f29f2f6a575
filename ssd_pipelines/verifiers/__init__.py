"""Decoding algorithms, one a file; each is swapped like a scheduler."""

from ssd_pipelines.verifiers.autoregressive import AutoregressiveVerifier
from ssd_pipelines.verifiers.base import DecodingState, Verifier
from ssd_pipelines.verifiers.spatial_draft import SpatialDraftVerifier


__all__ = ["AutoregressiveVerifier", "DecodingState", "SpatialDraftVerifier", "Verifier"]
