"""The interface between the decode loop and a family of autoregressive image models."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from ssd_pipelines.backbones.context import Context, Prompt
from ssd_pipelines.backbones.offload import enter, in_float32, offload_device
from ssd_pipelines.cache import DecodingCache
from ssd_pipelines.grid import ROW_END, Cells, TokenGrid, Window
from ssd_pipelines.sampling import SamplingSettings


class Backbone(ABC):
    """An adapter around the user's transformers model, which it never changes.

    A subclass defines the prompt format, codes and picture decoding of a model family. This base class runs the forward
    pass, which is similar for all families. Adapters are cheap: the pipeline creates one per call.

    Alignment: everywhere, `hidden[:, i]` is the state that *predicts* the token at position i, so it comes from the
    pass that fed position i - 1.

    Args:
        model: the loaded transformers model.
        tokenizer: its tokenizer, or `None`.
        image_tokenizer: a `diffusers.VQModel` that decodes codes to pixels, for models without a picture decoder.
        text_encoder: encodes the prompt, for models that don't (LlamaGen: T5).
    """

    model_type: ClassVar[str]
    """The `config.model_type` that this adapter supports."""

    model_class: ClassVar[type[Any]]
    """The transformers class that loads the family."""

    convert_first: ClassVar[dict[str, str]] = {}
    """By `architectures` of a published `config.json` that transformers can't load: the error text with what to do."""

    unused_parts: ClassVar[tuple[str, ...]] = ()
    """Prefixes of tensors that image generation doesn't need, so that a checkpoint may lack them."""

    absolute_positions: ClassVar[bool] = False
    """Whether position ids also count the padding before a prompt."""

    def __init__(self, model: Any, tokenizer: Any, image_tokenizer: Any = None, text_encoder: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.image_tokenizer = image_tokenizer
        self.text_encoder = text_encoder

    @classmethod
    def serves(cls, config: Any) -> bool:
        """Whether this adapter supports a config of its `model_type`; several families can share a `model_type`."""
        return True

    # --- defined by each family -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def decoder(self) -> nn.Module:
        """The transformer stack: takes `inputs_embeds` and returns the states after the final norm."""

    @property
    @abstractmethod
    def final_norm(self) -> nn.Module:
        """The last norm of `decoder`; its input is the pre-norm state."""

    @property
    @abstractmethod
    def image_vocab_size(self) -> int:
        """Number of image codes."""

    @property
    @abstractmethod
    def patch_size(self) -> int:
        """Side of a grid cell in pixels."""

    @abstractmethod
    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        """The token grid of a picture of `height` x `width` pixels, by default of the model's own size.

        Raises:
            ValueError: if the model doesn't support the size; the message says which sizes it supports.
        """

    @abstractmethod
    def branches(
        self, prompts: Sequence[str], negative_prompts: Sequence[str] | None, guided: bool, grid: TokenGrid
    ) -> list[list[int]]:
        """Token ids of each prompt in the family's format, up to the token that begins the picture.

        Args:
            prompts: one per row.
            negative_prompts: prompts of the unconditional branch; by default the family's own.
            guided: whether to append the ids of the unconditional branch of each prompt.
            grid: of the picture, for families whose prompt contains its size.
        """

    @abstractmethod
    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Embed image codes: `int64 (batch, n)` to `(batch, n, hidden_size)`."""

    @abstractmethod
    def image_head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits `(..., image_vocab_size)` of the image codes only, from states after the final norm."""

    @abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decode codes `int64 (batch, rows, columns)` to pixels `float32 (batch, 3, height, width)` in [-1, 1]."""

    def row_end_embedding(self) -> torch.Tensor:
        """The embedding `(hidden_size,)` of the forced row-end token, for families that have one.

        Raises:
            NotImplementedError: if the family has row ends, but doesn't override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} has row ends in its grid but no embedding for them.")

    @property
    def recommended_guidance_scale(self) -> float:
        """The guidance scale in the checkpoint's generation config, else that of the family's official recipe."""
        stated = getattr(getattr(self.model, "generation_config", None), "guidance_scale", None)
        return self.default_guidance_scale if stated is None else float(stated)

    default_guidance_scale: ClassVar[float] = 1.0
    recommended_sampling: ClassVar[SamplingSettings] = SamplingSettings()
    """Temperature, top-k and top-p of the family's official recipe."""

    def square_grid(self, side: int, height: int | None, width: int | None) -> TokenGrid:
        """The grid of a model that only supports squares of `side` x `side` codes.

        Raises:
            ValueError: for another `height` or `width` in pixels.
        """
        pixels = side * self.patch_size
        for value in (height, width):
            if value is not None and (type(value) is not int or value != pixels):
                raise self.refused_size(height, width, f"of {pixels} x {pixels} only")
        return TokenGrid(rows=side, columns=side)

    @staticmethod
    def refused_size(height: Any, width: Any, allowed: str) -> ValueError:
        """The error for an unsupported size: says what was given and which pictures the model supports."""
        sides = (("height", height), ("width", width))
        given = " and ".join(f"`{name}` is {value!r}" for name, value in sides if value is not None)
        given = given or "No size was given"
        return ValueError(f"{given}, but this model generates pictures {allowed}.")

    def check_tokenizer(self) -> None:
        """Check that there is a tokenizer; only prompts that are already encoded work without one.

        Raises:
            ValueError: if there is none.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.name_or_path or 'This model'} needs a tokenizer for prompts: pass `tokenizer=`.")

    def check_components(self) -> None:
        """Check that the other components belong to this model, before anything runs.

        Raises:
            ValueError: if the picture decoder has another number of codes than the backbone.
        """
        if self.image_tokenizer is None:
            return
        codes = getattr(self.image_tokenizer.config, "num_vq_embeddings", self.image_vocab_size)
        if codes != self.image_vocab_size:
            raise ValueError(
                f"The picture decoder in `image_tokenizer` knows {codes} codes, but "
                f"{self.name_or_path or 'the backbone'} draws {self.image_vocab_size}: pass the one that belongs to it."
            )

    # --- shared by all families -------------------------------------------------------------------------------------

    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str] | None,
        guided: bool,
        grid: TokenGrid | None = None,
    ) -> Prompt:
        """Encode prompts in the family's format, left padded.

        Args:
            prompts: one per row.
            negative_prompts: prompts of the unconditional branch; by default the family's own.
            guided: whether to append the unconditional branch of each prompt.
            grid: of the picture to generate; by default the model's own.

        Raises:
            ValueError: if there is no tokenizer, or it belongs to another model.
        """
        self.check_tokenizer()
        grid = self.grid() if grid is None else grid
        rows = self.branches(prompts, negative_prompts, guided, grid)
        length = max(len(ids) for ids in rows)
        padding = rows[0][0]  # any token works, because it is masked
        padded = [[padding] * (length - len(ids)) + ids for ids in rows]
        mask = [[0] * (length - len(ids)) + [1] * len(ids) for ids in rows]
        device = self.device
        embeddings = self.model.get_input_embeddings()(torch.tensor(padded, device=device)).to(device)
        return Prompt(embeddings, torch.tensor(mask, device=device), guided, grid)

    @property
    def hidden_size(self) -> int:
        """Width of the backbone's hidden states."""
        return self.model.config.get_text_config().hidden_size

    @property
    def max_positions(self) -> int:
        """The most positions that the backbone supports, prompt and picture together."""
        return self.model.config.get_text_config().max_position_embeddings

    @property
    def architecture(self) -> str:
        """Class name of the backbone."""
        return type(self.model).__name__

    @property
    def name_or_path(self) -> str:
        """Repository or folder that the backbone was loaded from; may be empty."""
        return self.model.config.name_or_path

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; with offload hooks its weights are elsewhere between passes."""
        return offload_device(self.model) or self.model.get_input_embeddings().weight.device

    def enter(self) -> None:
        """Run the model's offload hook, which otherwise runs only for the top-level forward."""
        enter(self.model)

    def new_context(self, prompt: Prompt, grid: TokenGrid) -> Context:
        """The `Context` of one call, with an empty cache.

        Raises:
            ValueError: if prompt and picture together need more positions than the model has.
        """
        capacity = prompt.length + grid.length
        if grid.length >= self.max_positions:
            raise ValueError(
                f"A picture of {grid.rows} x {grid.columns} codes has {grid.length} tokens, which leaves no room "
                f"for a prompt in the {self.max_positions} positions of {self.name_or_path or 'the backbone'}: use a "
                "smaller size."
            )
        if capacity > self.max_positions:
            raise ValueError(
                f"The prompt has {prompt.length} tokens and the picture {grid.length}, together more than the "
                f"{self.max_positions} positions of {self.name_or_path or 'the backbone'}: shorten the prompt."
            )
        cache = DecodingCache(self.model.config.get_text_config(), capacity)
        return Context(prompt, cache, grid, self.absolute_positions)

    def embed(self, sequence: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
        """Embed sequence tokens, row ends included: `int64 (batch, n)` to `(batch, n, hidden_size)`."""
        # A device map may have put the embeddings on another device than the sequence.
        if not grid.row_end:
            return self.embed_codes(sequence).to(sequence.device)
        embeddings = self.embed_codes(sequence.clamp_min(0)).to(sequence.device)
        return torch.where((sequence == ROW_END)[..., None], self.row_end_embedding().to(embeddings), embeddings)

    def forward(self, embeddings: torch.Tensor, context: Context, window: Window | None = None) -> torch.Tensor:
        """Run one forward pass that appends to the cache, or writes to the slots of `window`.

        Args:
            embeddings: `(batch, n, hidden_size)`; the pass writes n positions to the cache.
            context: cache, positions and masks of this call.
            window: if `Cells`, the pass writes to their slots; otherwise it appends to the cache.

        Returns:
            pre-norm hidden states `(batch, n, hidden_size)`; entry i predicts the token after fed position i.
        """
        if isinstance(window, Cells):
            slots = context.slots(window)
            with context.cache.writing_to(slots, context.prompt_length + window.stop):
                return self._run(
                    embeddings, context.mask(window, embeddings), context.positions.gather(1, slots), context
                )
        start = len(context.cache)
        stop = start + embeddings.shape[1]
        mask = context.attention_mask
        return self._run(
            embeddings, None if mask is None else mask[:, :stop], context.positions[:, start:stop], context
        )

    def _run(
        self, embeddings: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, context: Context
    ) -> torch.Tensor:
        with self._pre_norm_states() as captured:
            self.decoder(
                inputs_embeds=embeddings,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **context.cache.argument(self.decoder),
            )
        return captured[0].to(embeddings.device)

    @contextmanager
    def _pre_norm_states(self) -> Iterator[list[torch.Tensor]]:
        # `hidden_states[-1]` is after the norm in all versions of transformers, so a hook on the norm takes its input.
        # Another thread may run the same model: only this thread's pass is captured.
        thread = threading.get_ident()
        captured: list[torch.Tensor] = []

        def capture(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if threading.get_ident() == thread:
                captured.append(args[0])

        handle = self.final_norm.register_forward_pre_hook(capture)
        try:
            yield captured
        finally:
            handle.remove()

    def read(self, codes: torch.Tensor, prompt: Prompt, grid: TokenGrid) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward pass over complete pictures.

        Args:
            codes: `int64 (batch, rows, columns)`.
            prompt: with `batch` rows, or `2 * batch` with guidance.
            grid: of the pictures.

        Returns:
            the pre-norm states that predict each cell, and the embeddings of each cell's code, both
            `(batch or 2 * batch, rows, columns, hidden_size)`.
        """
        sequence = grid.empty_sequence(len(codes), codes.device)
        grid.to_codes(sequence)[:] = codes
        embeddings = self.embed(sequence, grid)
        if prompt.guided:
            embeddings = torch.cat([embeddings, embeddings])
        # The state that predicts a position comes from the position before it, so the last code is not fed.
        hidden = self.forward(
            torch.cat([prompt.embeddings, embeddings[:, :-1]], dim=1), self.new_context(prompt, grid)
        )[:, prompt.length - 1 :]
        return grid.to_codes(hidden), grid.to_codes(embeddings)

    def sliced_head(self, head: nn.Module, normed: torch.Tensor, first: int) -> torch.Tensor:
        """Compute only the logits of `image_vocab_size` tokens from `first` on, of a head for the whole vocabulary.

        This is exact, because the other tokens are masked out anyway, and takes several times less work.
        """
        rows = slice(first, first + self.image_vocab_size)
        if type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.weight.device == normed.device:
            weight: torch.Tensor = head.weight
            return nn.functional.linear(normed, weight[rows], None if head.bias is None else head.bias[rows])
        return head(normed)[..., rows]  # a quantised or offloaded weight can't be sliced

    def decode_with_image_tokenizer(self, codes: torch.Tensor, family: str | None = None) -> torch.Tensor:
        """Decode codes with the separate `image_tokenizer`, one picture at a time to limit memory.

        Args:
            codes: `int64 (batch, rows, columns)`.
            family: its name for `ssd-pipelines convert`, if that supports it.

        Raises:
            ValueError: if there is no `image_tokenizer`.
        """
        if self.image_tokenizer is None:
            how = (
                "pass a `diffusers.VQModel` as `image_tokenizer=`"
                if family is None
                else f"convert it once with `ssd-pipelines convert {family}`, and load the folder that this writes"
            )
            raise ValueError(
                f"{self.name_or_path or 'This model'} holds no picture decoder: {how}, or ask for "
                '`output_type="latent"`.'
            )
        enter(self.image_tokenizer)
        decoder = _PictureDecoder(self.image_tokenizer)
        return torch.cat([in_float32(decoder, picture) for picture in codes.split(1)])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits `float32 (..., image_vocab_size)` from pre-norm states `(..., hidden_size)`."""
        # A device map may have put the head on another device than the states.
        return self.image_head(self.final_norm(hidden)).to(hidden.device, torch.float32)


class _PictureDecoder(nn.Module):
    """The decoder of a `diffusers.VQModel`, from codes to pixels, as a forward."""

    def __init__(self, image_tokenizer: Any) -> None:
        super().__init__()
        self.image_tokenizer: Any = image_tokenizer

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = self.image_tokenizer.quantize.embedding(codes).permute(0, 3, 1, 2)
        return self.image_tokenizer.decoder(self.image_tokenizer.post_quant_conv(vectors))
