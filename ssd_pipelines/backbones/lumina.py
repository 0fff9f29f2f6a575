"""Lumina-mGPT (Alpha-VLLM/Lumina-mGPT-7B-768 and related checkpoints), converted to transformers' Chameleon classes.

Recipe of the official repository (Alpha-VLLM/Lumina-mGPT): a prompt that contains the size, followed by the
begin-of-image token and two size tokens, which are forced here; guidance scale 4, with an unconditional branch that
reads only these three tokens, with its own position ids; top-k 2000. A forced token ends every row. The published
checkpoints have no picture decoder: `ssd-pipelines convert lumina-mgpt` adds Meta's as the component `image_tokenizer`,
and reshapes the norms of queries and keys as transformers needs them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import ChameleonForConditionalGeneration

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.sampling import SamplingSettings


BEGIN_OF_IMAGE, END_OF_TURN, NEW_LINE = "<racm3:break>", "<reserved08706>", "<reserved08799>"
SIZE_UNIT = 32
"""Pixels per unit of a size token, which is two codes."""
DEFAULT_SIZE = 768
MAX_RATIO = 4.0


def size_token(pixels: int) -> str:
    """The token for the length of a side in pixels."""
    return f"<reserved{8800 + pixels // SIZE_UNIT:05d}>"


class LuminaBackbone(Backbone):
    """Adapter for Lumina-mGPT in a `ChameleonForConditionalGeneration`."""

    model_type = "chameleon"
    model_class = ChameleonForConditionalGeneration
    default_guidance_scale = 4.0
    recommended_sampling = SamplingSettings(temperature=1.0, top_k=2000)
    patch_size = 16
    convert_first = {
        "ChameleonXLLMXForConditionalGeneration": (
            "is Lumina-mGPT as published, which transformers can't load and which lacks a picture decoder: convert it "
            "once with `ssd-pipelines convert lumina-mgpt`, and load the folder that this writes"
        )
    }

    @classmethod
    def serves(cls, config: Any) -> bool:
        return cls.lacks(config if isinstance(config, dict) else vars(config)) is None

    @classmethod
    def lacks(cls, settings: dict[str, Any]) -> str | None:
        """What is missing in a Chameleon's `config.json` for it to be Lumina-mGPT's; `None` if nothing is."""
        for token in (BEGIN_OF_IMAGE, END_OF_TURN, NEW_LINE, size_token(SIZE_UNIT)):
            if token not in (settings.get("vocabulary_map") or {}):
                return f"{token} in its vocabulary_map"
        # Meta's own Chameleon and Anole have the same vocabulary. Only Lumina and our converter write these settings.
        marked = "image_size" in settings or "mask_image_logits" in settings
        if marked or set(settings.get("architectures") or ()) & set(cls.convert_first):
            return None
        return "mask_image_logits, as Meta's own Chameleon does"

    @property
    def decoder(self) -> nn.Module:
        return self.model.model

    @property
    def final_norm(self) -> nn.Module:
        return self.model.model.norm

    @property
    def image_vocab_size(self) -> int:
        return len(self.model.model.vocabulary_mapping.image_tokens)

    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        side = getattr(self.model.config, "image_size", None) or DEFAULT_SIZE
        units = (side // SIZE_UNIT) ** 2
        given = [value for value in (height, width) if value is not None]
        fits = all(type(value) is int and value > 0 and value % SIZE_UNIT == 0 for value in given)
        tall, wide = height or side, width or side
        if fits and len(given) == 1:  # compute the other side from the area
            other = max(1, units // (given[0] // SIZE_UNIT)) * SIZE_UNIT
            tall, wide = (other, wide) if height is None else (tall, other)
        if fits:
            area = tall * wide // SIZE_UNIT**2
            fits = 0.85 * units <= area <= units and max(tall / wide, wide / tall) <= MAX_RATIO
        if not fits:
            shapes = ", ".join(dict.fromkeys(f"{w}x{h}" for w, h in self._shapes(units)))
            raise self.refused_size(
                height,
                width,
                f"of up to {side * side} pixels whose sides are multiples of {SIZE_UNIT}, for instance (width x "
                f"height) {shapes}",
            )
        return TokenGrid(tall // self.patch_size, wide // self.patch_size, row_end=True)

    @staticmethod
    def _shapes(units: int) -> list[tuple[int, int]]:
        side = int(units**0.5)
        shapes = [(side, side)]
        for ratio in (4 / 3, 16 / 9, 2.0):
            long = round((units * ratio) ** 0.5)
            short = units // long
            shapes += [(long, short), (short, long)]
        return [(w * SIZE_UNIT, h * SIZE_UNIT) for w, h in shapes]

    def branches(
        self, prompts: Sequence[str], negative_prompts: Sequence[str] | None, guided: bool, grid: TokenGrid
    ) -> list[list[int]]:
        if self.tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE) != self._id(BEGIN_OF_IMAGE):
            raise ValueError(
                f"The tokenizer of {self.name_or_path or 'this model'} gives {BEGIN_OF_IMAGE} another id than the "
                "model's `vocabulary_map`, or has no such token: it belongs to another model."
            )
        height, width = grid.rows * self.patch_size, grid.columns * self.patch_size
        header = [self._id(BEGIN_OF_IMAGE), self._id(size_token(height)), self._id(size_token(width))]

        def ids(prompt: str) -> list[int]:
            text = f"Generate an image of {width}x{height} according to the following prompt:\n{prompt.strip()}"
            tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            return [self._bos_id(), *tokens, self._id(END_OF_TURN), *header]

        rows = [ids(prompt) for prompt in prompts]
        if guided:
            rows += (
                [header] * len(prompts) if negative_prompts is None else [ids(prompt) for prompt in negative_prompts]
            )
        return rows

    def _id(self, token: str) -> int:
        number = self.model.model.vocabulary_mapping.vocab_map.get(token)
        if number is None:
            raise ValueError(
                f"{self.name_or_path or 'This model'} has no token {token} in its `vocabulary_map`, which the prompt "
                "of this picture needs: use shorter sides."
            )
        return number

    def _bos_id(self) -> int:
        # The default in transformers' config is 1, but <s> is 0 in the tokenizer, which is right.
        known = self.tokenizer.bos_token_id
        return self.model.config.bos_token_id if known is None else known

    def _first_visual_token(self) -> int:
        mapping = self.model.model.vocabulary_mapping
        tokens, codes = mapping.image_tokens, mapping.img2bpe
        first = tokens[0]
        if tokens[-1] - first + 1 != len(tokens) or codes[0] != first or codes[len(tokens) - 1] != tokens[-1]:
            raise ValueError(
                f"{self.name_or_path or 'This model'} has {len(tokens)} image tokens with ids out of order: only "
                "consecutive ids in the order of the codes are supported."
            )
        return first

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(codes + self._first_visual_token())

    def row_end_embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(self._id(NEW_LINE), device=self.device))

    def image_head(self, normed: torch.Tensor) -> torch.Tensor:
        # transformers' own forward overwrites all image logits, so transformer and head are called separately here.
        return self.sliced_head(self.model.lm_head, normed, self._first_visual_token())

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self.decode_with_image_tokenizer(codes, "lumina-mgpt")
