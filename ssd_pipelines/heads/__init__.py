"""Draft heads: the model and its layers. Loading them onto a pipeline is in `heads.loading`."""

from ssd_pipelines.heads.model import FORMAT_VERSION, SpatialDraftHeads, StateKind, Target


__all__ = ["FORMAT_VERSION", "SpatialDraftHeads", "StateKind", "Target"]
