"""Tiny random backbones and heads in the real formats, for tests and documentation: built in milliseconds, no download.

They generate noise, but decoding behaves as with real models: pass counts, equality with plain transformers, batches.
"""

from typing import Any, Literal

import torch
from transformers import JanusConfig, JanusForConditionalGeneration

from ssd_pipelines.backbones import register_backbone, wrap_backbone
from ssd_pipelines.backbones.janus import BEGIN_OF_IMAGE, JanusBackbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.testing import models
from ssd_pipelines.verifiers import Verifier


FAMILIES = ("janus", "emu3", "lumina", "llamagen", "llamagen classes", "row ends")
"""Names for `tiny_family`; "llamagen classes" takes numbers below 20 as prompts, "row ends" is `RowEndJanus`."""


def tiny_family(family: str, side: int = 4, **heads: Any) -> SpatialSpeculativePipeline:
    """A pipeline with a tiny random backbone of a family, random heads and a picture decoder.

    Args:
        family: one of `FAMILIES`.
        side: rows and columns of the token grid.
        heads: settings for [`SpatialDraftHeads`].
    """
    parts: dict[str, Any]
    if family in ("janus", "row ends"):
        model_class = RowEndJanus if family == "row ends" else JanusForConditionalGeneration
        model = models.tiny_janus(side, model_class=model_class)
        parts = {"backbone": model, "tokenizer": models.tiny_tokenizer()}
    elif family.startswith("llamagen"):
        made = models.tiny_llamagen(side, condition="class" if family == "llamagen classes" else "text")
        parts = dict(zip(("backbone", "tokenizer", "text_encoder"), made, strict=True))
    else:
        make = {"emu3": models.tiny_emu3, "lumina": models.tiny_lumina}[family]
        parts = dict(zip(("backbone", "tokenizer"), make(side), strict=True))
    if family.startswith(("lumina", "llamagen")):
        parts["image_tokenizer"] = models.tiny_image_tokenizer()
    pipe = SpatialSpeculativePipeline(**parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = {"num_horizontal": 5, "num_vertical": 2, **heads}
        pipe.load_ssd_heads(SpatialDraftHeads.for_backbone(pipe.adapter(), **settings).eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe


class RowEndJanusConfig(JanusConfig):
    """Config of `RowEndJanus`."""

    model_type = "janus_with_row_ends"


class RowEndJanus(JanusForConditionalGeneration):
    """A Janus model that replaces, in tests, the families that force a token after every row (Lumina-mGPT, Emu3)."""

    config_class = RowEndJanusConfig


@register_backbone
class RowEndJanusBackbone(JanusBackbone):
    """Adapter for `RowEndJanus`, with the end-of-text token as the row end."""

    model_type = "janus_with_row_ends"
    model_class = RowEndJanus

    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        square = super().grid(height, width)
        return TokenGrid(square.rows, square.columns, row_end=True)

    def row_end_embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight[self.tokenizer.eos_token_id]


def tiny_heads(
    model: JanusForConditionalGeneration,
    num_horizontal: int = 5,
    num_vertical: int = 2,
    neighborhood: Literal["cell", "three"] = "cell",
    row_head: bool = False,
    seed: int = 0,
) -> SpatialDraftHeads:
    """Random draft heads that fit `model`."""
    backbone = wrap_backbone(model, models.tiny_tokenizer())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = SpatialDraftHeads.for_backbone(
            backbone,
            num_horizontal=num_horizontal,
            num_vertical=num_vertical,
            neighborhood=neighborhood,
            row_head=row_head,
        )
    return heads.eval()


def tiny_pipeline(
    side: int = 4,
    row_end: bool = False,
    verifier: Verifier | None = None,
    num_vertical: int = 2,
    neighborhood: Literal["cell", "three"] = "cell",
    row_head: bool = False,
    **model: int,
) -> SpatialSpeculativePipeline:
    """A pipeline with a tiny random Janus backbone and random heads.

    Args:
        side: rows and columns of the token grid.
        row_end: whether every row ends with a forced token.
        verifier: by default that of [`SpatialSpeculativePipeline`].
        num_vertical, neighborhood, row_head: settings for [`SpatialDraftHeads`].
        model: settings for `tiny_janus`.

    Example:
        >>> tiny_pipeline()("a red circle", output_type="latent").codes.shape
        torch.Size([1, 4, 4])
    """
    backbone = models.tiny_janus(side, model_class=RowEndJanus if row_end else JanusForConditionalGeneration, **model)
    heads = tiny_heads(backbone, num_vertical=num_vertical, neighborhood=neighborhood, row_head=row_head)
    pipe = SpatialSpeculativePipeline(backbone, models.tiny_tokenizer(), heads=heads, verifier=verifier)
    pipe.set_progress_bar_config(disable=True)
    return pipe


SIZES = {
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "janus-pro-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 5632,
    },
    "janus-pro-7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
}
"""Language model sizes of the Janus family; the first is not a released model."""


def random_pipeline(size: str, dtype: torch.dtype, device: str | torch.device) -> SpatialSpeculativePipeline:
    """A Janus pipeline of real size with random weights and heads, for time measurements; it generates noise.

    The picture decoder and the vision encoder are tiny, because decoding tokens doesn't use them.

    Args:
        size: one of `SIZES`.
        dtype, device: of backbone and heads.
    """
    sizes = SIZES[size]
    config = models.tiny_janus(side=24, image_vocab_size=16384, hidden_size=32, num_layers=1).config
    for name, value in {**sizes, "num_key_value_heads": sizes["num_attention_heads"]}.items():
        setattr(config.text_config, name, value)
    config.text_config.head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    config.vq_config.projection_dim = config.vq_config.image_token_embed_dim = sizes["hidden_size"]
    config.vision_config.projection_dim = sizes["hidden_size"]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = JanusForConditionalGeneration(config).eval()
            backbone = wrap_backbone(model, models.tiny_tokenizer())
            heads = SpatialDraftHeads.for_backbone(backbone, num_horizontal=5, num_vertical=1).eval()
    finally:
        torch.set_default_dtype(default)
    model.generation_config.generation_kwargs = {"boi_token_id": models.SPECIAL.index(BEGIN_OF_IMAGE)}
    model.generation_config.pad_token_id = models.SPECIAL.index("<pad>")
    pipe = SpatialSpeculativePipeline(model, models.tiny_tokenizer(), heads=heads)
    pipe.set_progress_bar_config(disable=True)
    return pipe
