"""LlamaGen (arXiv 2406.06525): its adapter, and the model itself, because no library has it.

Module names are those of the published checkpoints, so that conversion renames nothing. The model's quirks are kept,
because the weights were trained with them:

- Rotary angles are two-dimensional: half of a head's width is for the row, half for the column. The table is *zero* for
  the prefix, cosines included. So queries and keys of the prefix are zero, and all its positions get equal attention.
- Captions are right-aligned in 120 positions. Empty positions are masked in both branches of guidance.
- The unconditional branch reads a learned caption of 120 vectors, with the attention mask of the prompt.

Recipe of the official repository: guidance 7.5 and top-k 1000 for text, 4 and 2000 for classes. The official code also
removes web addresses and unusual punctuation from captions. Here prompts are only lower-cased, as in Diffusers'
pipelines in which the same cleaning is optional and off.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.context import Prompt
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.sampling import SamplingSettings


class LlamaGenConfig(PreTrainedConfig):
    """Config of a LlamaGen model.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads: sizes of the transformer (GPT-XL:
            1280, 36, 20, 20).
        intermediate_size: width of the feed-forward layers; by default 8/3 of `hidden_size`, rounded up to 256.
        vocab_size: number of image codes.
        grid_size: rows and columns of the token grid: 16, 24 or 32.
        condition: "text" or "class".
        prefix_length: positions before the first code: 120 for text, 1 for a class.
        caption_width: width of the text encoder's states.
        num_classes: number of classes of a class-conditional model.
        rope_theta: base of the rotary angles.
        rms_norm_eps: added to the mean square in each norm.
    """

    model_type = "llamagen"

    def __init__(
        self,
        hidden_size: int = 1280,
        num_hidden_layers: int = 36,
        num_attention_heads: int = 20,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        vocab_size: int = 16384,
        grid_size: int = 16,
        condition: str = "text",
        prefix_length: int = 120,
        caption_width: int = 2048,
        num_classes: int = 1000,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.intermediate_size = intermediate_size or -(-(hidden_size * 8 // 3) // 256) * 256
        self.vocab_size = vocab_size
        self.grid_size = grid_size
        self.condition = condition
        self.prefix_length = prefix_length
        self.caption_width = caption_width
        self.num_classes = num_classes
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = prefix_length + grid_size**2
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    """RMS norm that is computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `(..., width)`; the result has the dtype of `x`."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    """Attention with 2D rotary angles and grouped keys and values."""

    def __init__(self, config: LlamaGenConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads = index, config.num_attention_heads, config.num_key_value_heads
        self.width = config.hidden_size // self.heads
        self.wqkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.width, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Attend from `(batch, n, hidden_size)` to the cache and to `x`, with the angles of `rotation_table`."""
        sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        q, k, v = (part.unflatten(-1, (-1, self.width)) for part in self.wqkv(x).split(sizes, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, rotation), rotate(k, rotation), v))
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(..., hidden_size)`."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: LlamaGenConfig, index: int) -> None:
        super().__init__()
        self.attention = Attention(config, index)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Apply attention and feed-forward layer to `(batch, n, hidden_size)`."""
        x = x + self.attention(self.attention_norm(x), rotation, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class CaptionProjection(nn.Module):
    """Projects states of the text encoder to the width of the transformer."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.caption_width, config.hidden_size, bias=False)
        self.fc2 = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project `(..., caption_width)` to `(..., hidden_size)`."""
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Embeds captions; holds the learned caption of the unconditional branch."""

    uncond_embedding: torch.Tensor

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.cap_proj = CaptionProjection(config)
        self.register_buffer("uncond_embedding", torch.zeros(config.prefix_length, config.caption_width))

    def forward(self, captions: torch.Tensor, unconditional: int = 0) -> torch.Tensor:
        """Project captions, followed by copies of the learned unconditional caption.

        Args:
            captions: `(n, prefix_length, caption_width)`.
            unconditional: number of copies.

        Returns:
            `(n + unconditional, prefix_length, hidden_size)`.
        """
        learned = self.uncond_embedding.to(captions).expand(unconditional, -1, -1)
        return self.cap_proj(torch.cat([captions, learned]))


class LabelEmbedder(nn.Module):
    """Embedding table of the classes."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        # The last row is for the unconditional branch.
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.hidden_size)


class LlamaGenModel(PreTrainedModel):
    """The transformer, from embeddings to states after the final norm, and its image head `output`."""

    config_class = LlamaGenConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.cls_embedding = CaptionEmbedder(config) if config.condition == "text" else LabelEmbedder(config)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table of the image codes."""
        return self.tok_embeddings

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool = True,
    ) -> torch.Tensor:
        """Run the transformer.

        Args:
            inputs_embeds: `(batch, n, hidden_size)`.
            attention_mask: `(batch, length)` for all positions up to the last fed one, 0 where masked; or
                `(batch, 1, n, length)`, additive.
            position_ids: `int64 (batch, n)`, counted from the first prefix position, including empty ones.
            cache: transformers' `Cache`.
            use_cache: unused; accepted for compatibility.

        Returns:
            states after the final norm, `(batch, n, hidden_size)`.
        """
        batch, n, _ = inputs_embeds.shape
        past = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            position_ids = torch.arange(past, past + n, device=inputs_embeds.device).expand(batch, -1)
        rotation = rotation_table(self.config, inputs_embeds.device)[position_ids]
        mask = attention_mask
        if mask is None or mask.ndim == 2:
            length = past + n
            visible = torch.ones(n, length, dtype=torch.bool, device=inputs_embeds.device).tril(past)
            if mask is not None:
                own = torch.eye(n, length, dtype=torch.bool, device=visible.device).roll(past, 1)
                visible = (visible & mask[:, None, :].bool()) | own  # a masked position attends at least to itself
            mask = visible[:, None] if visible.ndim == 3 else visible
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, rotation, mask, cache)
        return self.norm(x)


def rotation_table(config: LlamaGenConfig, device: torch.device) -> torch.Tensor:
    """Cosines and sines of the rotary angles, `float32 (prefix + cells, head width / 2, 2)`, zero for the prefix."""
    half = config.hidden_size // config.num_attention_heads // 2
    rates = config.rope_theta ** -(torch.arange(0, half, 2, device=device).float() / half)
    angles = torch.arange(config.grid_size, device=device)[:, None] * rates
    side = config.grid_size
    grid = torch.cat([angles[:, None].expand(side, side, -1), angles[None].expand(side, side, -1)], dim=-1)
    table = torch.stack([grid.cos(), grid.sin()], dim=-1).flatten(0, 1)
    return torch.cat([table.new_zeros(config.prefix_length, *table.shape[1:]), table])


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of `(batch, n, heads, width)` by `(batch, n, width / 2, 2)`, computed in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cosine, sine = rotation[:, :, None].unbind(-1)
    a, b = pairs.unbind(-1)
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], dim=-1).flatten(-2).type_as(x)


class LlamaGenBackbone(Backbone):
    """Adapter for `LlamaGenModel`; text is encoded by T5, and a class is given by its number as the prompt."""

    model_type = "llamagen"
    model_class = LlamaGenModel
    absolute_positions = True
    patch_size = 16

    @property
    def decoder(self) -> nn.Module:
        return self.model

    @property
    def final_norm(self) -> nn.Module:
        return self.model.norm

    @property
    def image_vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def _from_text(self) -> bool:
        return self.model.config.condition == "text"

    @property
    def default_guidance_scale(self) -> float:  # type: ignore[override]
        return 7.5 if self._from_text else 4.0

    @property
    def recommended_sampling(self) -> SamplingSettings:  # type: ignore[override]
        return SamplingSettings(temperature=1.0, top_k=1000 if self._from_text else 2000)

    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        return self.square_grid(self.model.config.grid_size, height, width)

    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str] | None,
        guided: bool,
        grid: TokenGrid | None = None,
    ) -> Prompt:
        """Encode text with the text encoder, or class numbers with the class embeddings."""
        if not self._from_text:
            return self._encode_classes(prompts, negative_prompts, guided)
        features, mask = self._captions(prompts)
        learned = 0
        if guided and negative_prompts is not None:
            others, other_mask = self._captions(negative_prompts)
            features, mask = torch.cat([features, others]), torch.cat([mask, other_mask])
        elif guided:
            learned, mask = len(prompts), torch.cat([mask, mask])
        self.enter()  # again: with model offload this offloads the text encoder, which is no longer needed
        return Prompt(self.model.cls_embedding(features, learned).to(mask.device), mask, guided)

    def _run(self, *args: Any) -> torch.Tensor:
        hidden = super()._run(*args)
        # The decoder is the whole model. When it ends, group offload offloads what is outside of blocks, like the norm.
        self.enter()
        return hidden

    def check_components(self) -> None:
        super().check_components()
        if self.text_encoder is None:
            return
        width, wanted = self.text_encoder.config.d_model, self.model.config.caption_width
        if width != wanted:
            raise ValueError(
                f"The text encoder has states of width {width}, but {self.name_or_path or 'the backbone'} "
                f"reads captions of width {wanted}: pass the one that belongs to it."
            )

    def _captions(self, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """States of the text encoder, right-aligned: `(n, 120, width)`, and their mask `(n, 120)`."""
        if self.text_encoder is None:
            raise ValueError(
                f"{self.name_or_path or 'This model'} needs the states of a T5 encoder: load the folder that "
                "`ssd-pipelines convert llamagen` writes, or pass `text_encoder=`."
            )
        self.check_tokenizer()
        length = self.model.config.prefix_length
        tokens = self.tokenizer(
            [prompt.lower().strip() for prompt in prompts],  # the training captions were in lower case
            max_length=length,
            padding="max_length",
            padding_side="right",  # for any setting of the tokenizer, because the states are right-aligned below
            truncation=True,
            add_special_tokens=True,
            return_tensors="pt",
        ).to(self.device)
        mask = tokens["attention_mask"]
        states = self.text_encoder(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
        order = (torch.arange(length, device=mask.device) + mask.sum(1, keepdim=True)) % length
        states = states.to(mask.device, self.model.dtype).gather(1, order[..., None].expand_as(states))
        mask = mask.gather(1, order)
        return states * mask[..., None], mask

    def _encode_classes(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None, guided: bool) -> Prompt:
        number = self.model.config.num_classes
        texts = [*prompts, *(negative_prompts or [])] if guided else list(prompts)
        for text in texts:
            if not text.strip().isdecimal() or int(text) >= number:
                raise ValueError(f"The prompt {text!r} is no class: give a number from 0 to {number - 1}, like '207'.")
        classes = [int(text) for text in texts]
        if guided and negative_prompts is None:
            classes += [number] * len(prompts)
        labels = torch.tensor(classes, device=self.device)
        embeddings = self.model.cls_embedding.embedding_table(labels).to(labels.device)[:, None]
        return Prompt(embeddings, torch.ones_like(labels)[:, None], guided)

    def branches(
        self, prompts: Sequence[str], negative_prompts: Sequence[str] | None, guided: bool, grid: TokenGrid
    ) -> list[list[int]]:
        raise NotImplementedError("LlamaGen reads the states of a text encoder, not tokens: use `encode_prompt`.")

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.tok_embeddings(codes)

    def image_head(self, normed: torch.Tensor) -> torch.Tensor:
        return self.model.output(normed)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self.decode_with_image_tokenizer(codes, "llamagen")
