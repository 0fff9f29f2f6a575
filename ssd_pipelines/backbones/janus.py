"""Janus and Janus-Pro in transformers' format: deepseek-community/Janus-Pro-1B, -7B, and the embedded model.

Recipe of the official repository (deepseek-ai/Janus, `generation_inference.py`): the prompt as one user turn; guidance
scale 5, with an unconditional branch in which all prompt tokens but the first and last are padding; temperature 1; no
filters; 24 x 24 codes of 16 pixels. Logits and guidance are in float32 here; the official code keeps the model's dtype.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import JanusForConditionalGeneration

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.offload import in_float32
from ssd_pipelines.grid import TokenGrid


BEGIN_OF_IMAGE = "<begin_of_image>"


class JanusBackbone(Backbone):
    """Adapter for transformers' `JanusForConditionalGeneration`."""

    model_type = "janus"
    model_class = JanusForConditionalGeneration
    unused_parts = ("model.vision_model.", "model.aligner.", "model.vqmodel.encoder.", "model.vqmodel.quant_conv.")
    default_guidance_scale = 5.0

    @property
    def decoder(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def final_norm(self) -> nn.Module:
        return self.model.model.language_model.norm

    @property
    def image_vocab_size(self) -> int:
        return self.model.config.vq_config.num_embeddings

    @property
    def patch_size(self) -> int:
        # The picture decoder doubles the size between consecutive levels.
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        return self.square_grid(self.model.config.vq_config.num_patches, height, width)

    def branches(
        self, prompts: Sequence[str], negative_prompts: Sequence[str] | None, guided: bool, grid: TokenGrid
    ) -> list[list[int]]:
        rows = [self._prompt_ids(prompt) for prompt in prompts]
        if guided and negative_prompts is not None:
            rows += [self._prompt_ids(prompt) for prompt in negative_prompts]
        elif guided:
            # This padding is not masked: the model was trained with it as its unconditional prompt.
            rows += [[ids[0], *[self.pad_token_id] * (len(ids) - 2), ids[-1]] for ids in rows]
        return rows

    def _prompt_ids(self, prompt: str) -> list[int]:
        text = f"<|User|>: {prompt.strip()}\n\n<|Assistant|>:{BEGIN_OF_IMAGE}"
        ids = list(self.tokenizer(text)["input_ids"])
        if self.tokenizer.bos_token_id is not None and ids[0] != self.tokenizer.bos_token_id:
            ids.insert(0, self.tokenizer.bos_token_id)
        begin = self.tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)
        if begin in (None, self.tokenizer.unk_token_id) or ids[-1] != begin:
            raise ValueError(
                f"The tokenizer of {self.name_or_path or 'this model'} has no {BEGIN_OF_IMAGE} token: it belongs to "
                "another model."
            )
        return ids

    @property
    def pad_token_id(self) -> int:
        """The padding token of the unconditional branch.

        Raises:
            ValueError: if neither generation config nor tokenizer has one.
        """
        stated = self.model.generation_config.pad_token_id
        pad = self.tokenizer.pad_token_id if stated is None else stated
        if pad is None:
            raise ValueError("The unconditional branch of Janus needs a padding token: set `tokenizer.pad_token`.")
        return pad

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.prepare_embeddings_for_image_generation(codes)

    def image_head(self, normed: torch.Tensor) -> torch.Tensor:
        return self.model.model.generation_head(normed)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return in_float32(_PictureDecoder(self.model.model.vqmodel), codes.flatten(1))


class _PictureDecoder(nn.Module):
    """`vqmodel.decode` as a forward, so that `functional_call` can run it with other weights."""

    def __init__(self, vqmodel: Any) -> None:
        super().__init__()
        self.vqmodel: Any = vqmodel

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.vqmodel.decode(tokens)
