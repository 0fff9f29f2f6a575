"""Tiny random backbones, heads and pipelines in the real formats, for tests and documentation."""

from ssd_pipelines.testing.models import (
    SPECIAL,
    tiny_emu3,
    tiny_image_tokenizer,
    tiny_janus,
    tiny_llamagen,
    tiny_lumina,
    tiny_tokenizer,
)
from ssd_pipelines.testing.pipelines import (
    FAMILIES,
    SIZES,
    RowEndJanus,
    random_pipeline,
    tiny_family,
    tiny_heads,
    tiny_pipeline,
)


__all__ = [
    "FAMILIES",
    "SIZES",
    "SPECIAL",
    "RowEndJanus",
    "random_pipeline",
    "tiny_emu3",
    "tiny_family",
    "tiny_heads",
    "tiny_image_tokenizer",
    "tiny_janus",
    "tiny_llamagen",
    "tiny_lumina",
    "tiny_pipeline",
    "tiny_tokenizer",
]
