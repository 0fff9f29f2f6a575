"""Publish draft heads and pipelines on the Hub, with model cards and notebooks."""

from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.publishing.push import (
    Destination,
    prepared_head_repo,
    push_folder,
    push_heads,
    push_pipeline,
    read_base_model,
)


__all__ = [
    "Destination",
    "SpatialDraftHeads",
    "prepared_head_repo",
    "push_folder",
    "push_heads",
    "push_pipeline",
    "read_base_model",
]
