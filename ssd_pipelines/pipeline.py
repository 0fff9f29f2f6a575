"""The pipeline: one decode loop for all backbones and verifiers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from diffusers import DiffusionPipeline, VQModel
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import VaeImageProcessor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ssd_pipelines.backbones import Backbone, LlamaGenModel, Prompt, wrap_backbone
from ssd_pipelines.grid import UNDRAWN, TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.heads.loading import SSDHeadsLoaderMixin
from ssd_pipelines.input_checks import check_generators, check_prompts
from ssd_pipelines.loading.pipelines import PipelineLoaderMixin
from ssd_pipelines.pipeline_output import DecodingStats, PhaseClock, SpatialSpeculativePipelineOutput
from ssd_pipelines.sampling import Generators, guide
from ssd_pipelines.verifiers import (
    AutoregressiveVerifier,
    DecodingState,
    JacobiVerifier,
    SpatialDraftVerifier,
    Verifier,
    WavefrontVerifier,
)


class SpatialSpeculativePipeline(PipelineLoaderMixin, SSDHeadsLoaderMixin, DiffusionPipeline):
    """Text-to-image pipeline for autoregressive image models, decoded with the algorithm of its `verifier`.

    Args:
        backbone: a transformers model of a supported family (Janus-Pro in its transformers format).
        tokenizer: the backbone's tokenizer; class-conditional models have none.
        heads: draft heads trained for the backbone; without them, a verifier that needs heads decodes autoregressively.
        verifier: the decoding algorithm, swapped like a scheduler; [`SpatialDraftVerifier`] by default.
        image_tokenizer: decodes codes to pixels, for backbones without an image decoder (Lumina-mGPT, LlamaGen).
        text_encoder: encodes the prompt, for backbones that don't (LlamaGen).

    Raises:
        ValueError: if a component belongs to another model than the backbone.

    Example:
        >>> import ssd_pipelines
        >>> pipe = ssd_pipelines.SpatialSpeculativePipeline.from_pretrained(ssd_pipelines.scenes.CHECKPOINT)
        >>> image = pipe("a red circle and a blue square", generator=torch.Generator().manual_seed(0)).images[0]
    """

    model_cpu_offload_seq = "text_encoder->backbone->image_tokenizer"
    _optional_components = ["tokenizer", "heads", "verifier", "image_tokenizer", "text_encoder"]
    # The heads are small and run after every pass of the backbone: moving them back and forth would cost more.
    _exclude_from_cpu_offload = ["heads"]
    _callback_tensor_inputs = ["latents", "drafted", "corrected"]

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        heads: SpatialDraftHeads | None = None,
        verifier: Verifier | None = None,
        image_tokenizer: VQModel | None = None,
        text_encoder: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        adapter = wrap_backbone(backbone, tokenizer, image_tokenizer, text_encoder)
        adapter.check_components()
        if heads is not None:
            heads.check_compatible(adapter)
        self.register_modules(
            backbone=backbone,
            tokenizer=tokenizer,
            heads=heads,
            verifier=verifier or SpatialDraftVerifier(),
            image_tokenizer=image_tokenizer,
            text_encoder=text_encoder,
        )
        self._replaceable_verifier = self.verifier if verifier is None else None  # loading heads may replace it
        self.image_processor = VaeImageProcessor(vae_scale_factor=adapter.patch_size)
        self._guidance_scale = 1.0
        self._num_timesteps = 0
        self._interrupt = False

    def adapter(self) -> Backbone:
        """The adapter through which the decode loop uses the backbone: see [`Backbone`]."""
        return wrap_backbone(self.backbone, self.tokenizer, self.image_tokenizer, self.text_encoder)

    @property
    def guidance_scale(self) -> float:
        """Guidance scale of the current call."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current call runs the unconditional branch."""
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        """Backbone passes of the current call: those made plus `Verifier.passes_left`."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether the current call ends after this pass."""
        return self._interrupt

    def encode_prompt(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        height: int | None = None,
        width: int | None = None,
    ) -> Prompt:
        """Encode prompts in the backbone's own format, which for some families includes the image size.

        Returns:
            a [`Prompt`] of `len(prompt) * num_images_per_prompt` rows, twice as many with guidance (conditional first).
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else negative_prompt
        repeated = [text for text in prompts for _ in range(num_images_per_prompt)]
        if negatives is not None:
            negatives = [text for text in negatives for _ in range(num_images_per_prompt)]
        backbone = self.adapter()
        return backbone.encode_prompt(repeated, negatives, do_classifier_free_guidance, backbone.grid(height, width))

    def check_inputs(
        self,
        prompt: Any,
        negative_prompt: Any,
        num_images_per_prompt: Any,
        guidance_scale: float,
        generator: Any,
        latents: Any,
        grid: TokenGrid,
        output_type: str,
        callback_on_step_end: Any,
        callback_on_step_end_tensor_inputs: Sequence[str],
        prompt_embeds: Any = None,
    ) -> None:
        """Raise a `ValueError` that says what is allowed if an argument of a call is invalid, before anything runs."""
        is_number = isinstance(guidance_scale, Real) and not isinstance(guidance_scale, bool)
        if not is_number or not 0 <= guidance_scale < math.inf:
            raise ValueError(f"`guidance_scale` must be 0 to 1 (no guidance) or more, got {guidance_scale!r}.")
        given = (prompt, negative_prompt, num_images_per_prompt)
        batch_size = check_prompts(*given, prompt_embeds, guidance_scale, grid)
        check_generators(generator, batch_size, self.adapter().device)
        if not isinstance(latents, torch.Tensor | None):
            raise ValueError(f"`latents` must be a tensor of codes, got {type(latents).__name__}.")
        if latents is not None and tuple(latents.shape) != (batch_size, grid.rows, grid.columns):
            raise ValueError(
                f"`latents` must be codes of shape {(batch_size, grid.rows, grid.columns)}, got {tuple(latents.shape)}."
            )
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f'`output_type` must be "pil", "np", "pt" or "latent", got {output_type!r}.')
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise ValueError(f"`callback_on_step_end` must be callable, got {callback_on_step_end!r}.")
        unknown = [name for name in callback_on_step_end_tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"`callback_on_step_end_tensor_inputs` has to be in {self._callback_tensor_inputs}, got {unknown}."
            )
        if self.backbone.training:
            raise ValueError("The backbone is in training mode: call `pipe.backbone.eval()` first.")

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., dict[str, Any]] | PipelineCallback | MultiPipelineCallbacks | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        prompt_embeds: Prompt | None = None,
    ) -> SpatialSpeculativePipelineOutput:
        """Generate images; an invalid argument raises a `ValueError`.

        Args:
            prompt: one prompt or a list of prompts.
            height, width: in pixels; by default the backbone's own size.
            guidance_scale: weight of classifier-free guidance; up to 1 there is none, and the unconditional branch
                doesn't run. By default the one recommended for the backbone.
            negative_prompt: prompt of the unconditional branch instead of the family's empty prompt; one for all
                prompts or one per prompt. Ignored without guidance.
            num_images_per_prompt: images to generate per prompt; they follow each other in the output.
            temperature, top_k, top_p: override the verifier's settings for this call.
            generator: one for the batch, or a list with one per image. With a list, image k is the same as in a call
                with its prompt and generator alone. CPU generators work with models on any device.
            latents: codes `int64 (batch, rows, columns)`, negative for none. The leading complete rows are kept, and
                the rows below are generated. Pass the `codes` of an interrupted run to resume it.
            output_type: "pil", "np", "pt", or "latent" for the codes.
            return_dict: `False` returns `(images,)`.
            callback_on_step_end: called after every pass as `callback(pipe, step, passes_left, kwargs)`; if it returns
                "latents", they are written back. Setting `pipe._interrupt = True` ends the call after this pass.
            callback_on_step_end_tensor_inputs: "latents" (codes `(batch, rows, columns)` with draft tokens, negative
                for none), "drafted" and "corrected" (`bool`, same shape: draft tokens, and what this pass changed).
            prompt_embeds: encoded prompts from `encode_prompt`, instead of `prompt`.

        Returns:
            [`SpatialSpeculativePipelineOutput`] with images, codes and statistics.
        """
        # 1. Check inputs
        if isinstance(callback_on_step_end, PipelineCallback | MultiPipelineCallbacks):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        if isinstance(callback_on_step_end_tensor_inputs, str):
            callback_on_step_end_tensor_inputs = [callback_on_step_end_tensor_inputs]
        callback_on_step_end_tensor_inputs = callback_on_step_end_tensor_inputs or ()
        backbone = self.adapter()
        grid = backbone.grid(height, width)
        self._guidance_scale = backbone.recommended_guidance_scale if guidance_scale is None else guidance_scale
        self._interrupt = False
        self.check_inputs(
            prompt,
            negative_prompt,
            num_images_per_prompt,
            self._guidance_scale,
            generator,
            latents,
            grid,
            output_type,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
            prompt_embeds,
        )
        verifier = self._verifier_for(grid)
        sampling = verifier.sampling(backbone.recommended_sampling, temperature=temperature, top_k=top_k, top_p=top_p)

        # 2. Encode the prompt
        backbone.enter()
        device = backbone.device  # Diffusers' `_execution_device` visits every module, which takes milliseconds
        stats, clock = DecodingStats(tokens=grid.length), PhaseClock(device)
        guided = self.do_classifier_free_guidance
        with clock.phase("prompt"):
            encoded = prompt_embeds
            if encoded is None:
                assert prompt is not None, "checked above"
                encoded = self.encode_prompt(prompt, negative_prompt, num_images_per_prompt, guided, height, width)
        batch_size = encoded.embeddings.shape[0] // (1 + guided)

        # 3. Prepare the codes and the cache
        sequence, start_row = self.prepare_latents(batch_size, grid, latents, device)

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            embeddings = backbone.embed(tokens, grid)
            return torch.cat([embeddings, embeddings]) if guided else embeddings

        def head(hidden: torch.Tensor) -> torch.Tensor:
            logits = backbone.logits(hidden)
            return guide(logits, self._guidance_scale) if guided else logits

        state = DecodingState(grid, sequence, sampling, generator, self.heads, embed, head, stats, clock, start_row)
        context = backbone.new_context(encoded, grid)

        # 4. Decode: the verifier chooses what to feed, and acts on the predictions
        self._num_timesteps = verifier.passes_left(state)
        with self.progress_bar(total=self._num_timesteps) as progress_bar:
            while (window := verifier.next_window(state)) is not None:
                first = state.passes == 0
                with clock.phase("prompt" if first else "passes"):
                    embeddings = embed(state.tokens(window))
                    if first:
                        embeddings = torch.cat([encoded.embeddings, embeddings], dim=1)
                    hidden = backbone.forward(embeddings, context, window)
                # The state of the last prompt token predicts the first code
                state.hidden.receive(window, hidden[:, encoded.length - 1 :] if first else hidden)
                stats.record_pass(window, state.settled < grid.length)

                before = None if callback_on_step_end is None else state.sequence.clone()
                verifier.step(state)
                # Truncate the cache to the committed positions
                context.cache.truncate(min(len(context.cache), encoded.length + int(state.committed.max())))
                state.passes += 1

                self._num_timesteps = state.passes + verifier.passes_left(state)
                if callback_on_step_end is not None and before is not None:
                    self._call_back(callback_on_step_end, callback_on_step_end_tensor_inputs, state, verifier, before)
                progress_bar.total = self._num_timesteps  # usually falls, as draft tokens are accepted
                progress_bar.update()
                if self._interrupt:
                    break

        # 5. Decode the codes to pixels
        stats.rows_completed = state.rows_completed()
        codes = grid.to_codes(sequence).clone()
        codes[:, stats.rows_completed :] = UNDRAWN
        with clock.phase("decoding"):
            images: Any = codes if output_type == "latent" else self.decode_latents(codes, output_type)
        stats.seconds = clock.seconds()

        # 6. Offload all models
        self.maybe_free_model_hooks()

        if not return_dict:
            return (images,)  # type: ignore[return-value]  # a plain tuple, as in Diffusers
        return SpatialSpeculativePipelineOutput(images=images, codes=codes, stats=stats)

    def prepare_latents(
        self, batch_size: int, grid: TokenGrid, latents: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor, int]:
        """The sequence `int64 (batch_size, grid.length)` to decode into, and how many of its rows are given.

        Raises:
            ValueError: if `latents` are not whole numbers below the size of the image vocabulary.
        """
        sequence = grid.empty_sequence(batch_size, device)
        if latents is None:
            return sequence, 0
        vocabulary = self.adapter().image_vocab_size
        if latents.is_floating_point() or latents.dtype == torch.bool or int(latents.max()) >= vocabulary:
            raise ValueError(f"`latents` must be whole numbers below {vocabulary}, the size of the image vocabulary.")
        complete = (latents >= 0).all(dim=2).all(dim=0)
        start_row = grid.rows if bool(complete.all()) else int(complete.int().argmin())
        grid.to_codes(sequence)[:, :start_row] = latents[:, :start_row].to(device)
        return sequence, start_row

    @torch.no_grad()
    def decode_latents(self, codes: torch.Tensor, output_type: str = "pil") -> Any:
        """Decode codes `(batch, rows, columns)` to images; cells without codes become grey.

        Returns:
            a list for "pil"; in [0, 1], `(batch, height, width, 3)` for "np", `(batch, 3, height, width)` for "pt".
        """
        backbone = self.adapter()
        backbone.enter()
        pixels = backbone.decode(codes.clamp_min(0))
        missing = (codes < 0).repeat_interleave(backbone.patch_size, 1).repeat_interleave(backbone.patch_size, 2)
        pixels = pixels.masked_fill(missing[:, None], 0.0)
        return self.image_processor.postprocess(pixels, output_type=output_type)

    def _verifier_for(self, grid: TokenGrid) -> Verifier:
        verifier = self.verifier
        if verifier.needs_heads and self.heads is None:
            return AutoregressiveVerifier.from_config(verifier.config)
        if self.heads is not None and verifier.needs_heads:
            self.heads.check_compatible(self.adapter(), grid)
        verifier.check(grid, self.heads)
        return verifier

    def _call_back(
        self,
        callback: Callable[..., Any],
        names: Sequence[str],
        state: DecodingState,
        verifier: Verifier,
        before: torch.Tensor,
    ) -> None:
        codes = state.grid.to_codes(state.sequence)
        positions = state.grid.to_codes(torch.arange(state.grid.length, device=codes.device)[None])
        available = {
            "latents": codes.clone(),
            "drafted": (positions >= state.settled.to(codes.device)[:, None, None])
            & (positions < state.drafted.to(codes.device)[:, None, None]),
            "corrected": state.grid.to_codes((state.sequence != before) & (before >= 0)),
        }
        kwargs = {}
        for name in names:
            kwargs[name] = available[name]
        returned = callback(self, state.passes - 1, verifier.passes_left(state), kwargs)
        if returned and "latents" in returned:
            codes.copy_(returned["latents"])


@contextmanager
def hidden_progress_bar(pipe: SpatialSpeculativePipeline) -> Iterator[None]:
    """Context manager that hides the pipeline's progress bar, for instance inside another bar, and restores it."""
    before = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)


# `model_index.json` stores the public path, so that files can move without breaking saved pipelines.
for _saved in (
    SpatialSpeculativePipeline,
    SpatialDraftHeads,
    SpatialDraftVerifier,
    AutoregressiveVerifier,
    JacobiVerifier,
    WavefrontVerifier,
    LlamaGenModel,
):
    _saved.__module__ = "ssd_pipelines"
