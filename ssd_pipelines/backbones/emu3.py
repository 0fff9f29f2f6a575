"""Emu3-Gen in transformers' format: BAAI/Emu3-Gen-hf.

Recipe of the official repository (baaivision/Emu3): the prompt with a quality suffix, followed by the picture's size in
codes; guidance scale 3 with a fixed negative prompt, which is followed by the size too; top-k 2048. A forced token ends
every row. The official code runs the two branches of guidance one after the other. Here they are one left-padded batch,
in which each branch has its own position ids. This gives the same codes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Emu3ForConditionalGeneration

from ssd_pipelines.backbones.base import Backbone
from ssd_pipelines.backbones.offload import in_float32
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.sampling import SamplingSettings


QUALITY_SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE_PROMPT = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
IMAGE_AREA = 720 * 720
"""Pixels of a picture of any aspect ratio, unless the checkpoint's config has an `image_area`."""
BEGIN_OF_IMAGE, IMAGE_TOKENS_FOLLOW, ROW_END_TOKEN = "<|image start|>", "<|image token|>", "<|extra_200|>"

LONGEST_RATIO = 8
"""Largest aspect ratio of a picture. This limit is ours; the recipe has none."""


class Emu3Backbone(Backbone):
    """Adapter for transformers' `Emu3ForConditionalGeneration`."""

    model_type = "emu3"
    model_class = Emu3ForConditionalGeneration
    unused_parts = ("model.vqmodel.encoder.", "model.vqmodel.quant_conv.")
    default_guidance_scale = 3.0
    recommended_sampling = SamplingSettings(temperature=1.0, top_k=2048)

    @property
    def decoder(self) -> nn.Module:
        return self.model.model.text_model

    @property
    def final_norm(self) -> nn.Module:
        return self.model.model.text_model.norm

    @property
    def image_vocab_size(self) -> int:
        return self.model.config.vq_config.codebook_size

    @property
    def patch_size(self) -> int:
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        area, patch = getattr(self.model.config, "image_area", None) or IMAGE_AREA, self.patch_size
        given = [value for value in (height, width) if value is not None]
        fits = all(type(value) is int and value > 0 and value % patch == 0 for value in given)
        if fits and len(given) < 2:
            # Compute the other side from the area.
            rows = columns = round((area**0.5) / patch)
            if height is not None:
                rows, columns = height // patch, max(1, round(area / height / patch))
            elif width is not None:
                rows, columns = max(1, round(area / width / patch)), width // patch
        elif fits:
            rows, columns = given[0] // patch, given[1] // patch
        # The recipe rounds both sides to whole codes, which matters for small pictures.
        cells = area / patch**2
        fits = fits and max(rows, columns) <= LONGEST_RATIO * min(rows, columns)
        rounded = fits and (rows - 0.5) * (columns - 0.5) <= cells <= (rows + 0.5) * (columns + 0.5)
        if not fits or not (rounded or abs(rows * columns - cells) <= 0.06 * cells):
            ratios = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))
            shapes = ", ".join(dict.fromkeys(self._shape(area, *ratio) for ratio in ratios))
            raise self.refused_size(
                height,
                width,
                f"of about {area} pixels whose sides are multiples of {patch}, up to {LONGEST_RATIO}:1, for "
                f"instance (width x height) {shapes}",
            )
        return TokenGrid(rows, columns, row_end=True)

    def _shape(self, area: int, width: int, height: int) -> str:
        scale = (area / (width * height)) ** 0.5 / self.patch_size
        return f"{round(width * scale) * self.patch_size}x{round(height * scale) * self.patch_size}"

    def branches(
        self, prompts: Sequence[str], negative_prompts: Sequence[str] | None, guided: bool, grid: TokenGrid
    ) -> list[list[int]]:
        rows = [self._prompt_ids(prompt.strip() + QUALITY_SUFFIX, grid) for prompt in prompts]
        if guided:
            negatives = [NEGATIVE_PROMPT] * len(prompts) if negative_prompts is None else negative_prompts
            rows += [self._prompt_ids(prompt, grid) for prompt in negatives]
        return rows

    def _prompt_ids(self, text: str, grid: TokenGrid) -> list[int]:
        size = f"{BEGIN_OF_IMAGE}{grid.rows}*{grid.columns}{IMAGE_TOKENS_FOLLOW}"
        ids = list(self.tokenizer(f"{self.tokenizer.bos_token}{text}{size}", add_special_tokens=False)["input_ids"])
        last = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKENS_FOLLOW)
        if last in (None, self.tokenizer.unk_token_id) or ids[-1] != last:
            name = self.name_or_path or "this model"
            raise ValueError(
                f"The tokenizer of {name} has no {IMAGE_TOKENS_FOLLOW} token: it belongs to another model."
            )
        return ids

    def _first_visual_token(self) -> int:
        """The token id of the first code. All releases have consecutive ids, so that the head can be sliced."""
        tokens = self.model.model.vocabulary_mapping.image_tokens
        codes = self.model.model.vocabulary_mapping.img2bpe
        first = tokens[0]
        if len(tokens) != self.image_vocab_size or tokens[-1] - first + 1 != len(tokens) or codes[0] != first:
            raise ValueError(
                f"{self.name_or_path or 'This model'} has {len(tokens)} visual tokens from {first} to {tokens[-1]} for "
                f"{self.image_vocab_size} codes: only consecutive ones in the order of the codes are supported."
            )
        return first

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(codes + self._first_visual_token())

    def row_end_embedding(self) -> torch.Tensor:
        token = self.model.model.vocabulary_mapping.eol_token_id
        return self.model.get_input_embeddings()(torch.tensor(token, device=self.device))

    def image_head(self, normed: torch.Tensor) -> torch.Tensor:
        return self.sliced_head(self.model.lm_head, normed, self._first_visual_token())

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        decoder = _PictureDecoder(self.model.model.vqmodel)
        # One picture at a time: the decoder takes gigabytes per picture of 720 x 720 pixels.
        return torch.cat([in_float32(decoder, picture) for picture in codes.split(1)])


class _PictureDecoder(nn.Module):
    """`vqmodel.decode` for one frame, as a forward.

    transformers' own decode makes a clip of four frames of every picture, at full size, and keeps the first. The frames
    are mixed only in the temporal layers, at the size of the code grid; after these, each is a separate picture of a
    batch. So the other three are dropped there: the same pixels in a quarter of the memory and time.
    """

    def __init__(self, vqmodel: Any) -> None:
        super().__init__()
        self.vqmodel: Any = vqmodel

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        decoder = self.vqmodel.decoder
        vectors = self.vqmodel.quantize.embedding(codes).permute(0, 3, 1, 2)[:, :, None]
        latents = torch.cat([self.vqmodel.post_quant_conv(vectors), vectors])  # (2, channels, frames, rows, columns)
        for layer in decoder.time_res_stack:
            latents = layer(latents)
        for layer in decoder.time_conv:
            latents = nn.functional.silu(layer(latents))
        states, condition = latents[:, :, 0].chunk(2)
        states = decoder.up_block(decoder.middle_block(decoder.conv_in(states), condition), condition)
        return decoder.conv_out(nn.functional.silu(decoder.norm_out(states, condition)))
