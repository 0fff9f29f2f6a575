"""Drawing pictures: live preview while they are decoded, seeds that reproduce them, a stop button."""

import time
from collections.abc import Iterator
from typing import Any

import gradio as gr
import torch

from ssd_pipelines.demo.common import LARGEST_SEED, Fields, checked, in_words
from ssd_pipelines.demo.figures import SMALL
from ssd_pipelines.demo.models import DemoModel, on_gpu
from ssd_pipelines.demo.streaming import stream
from ssd_pipelines.evaluation.decoders import with_sampling
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.pipeline_output import SpatialSpeculativePipelineOutput
from ssd_pipelines.race import race_decoders


PREVIEW_SHARE = 0.2
"""Previews take at most about this share of the time."""


def generate_tab(models: dict[str, DemoModel]) -> Fields:
    """Build the tab."""
    fields = Fields(models, "Draw", "generate")
    first = next(iter(models.values()))
    names, own = _choices(first)
    backbone = first.pipe.adapter()
    small = backbone.grid().columns * backbone.patch_size <= SMALL
    with gr.Accordion("Settings", open=False):
        count = gr.Slider(1, 4, 1, step=1, label="Pictures", info="The next picture has the next seed.")
        decoder = gr.Dropdown(names, value=names[-1], label="Decoder")
        with gr.Row():
            guidance = gr.Number(own[0], label="Guidance scale", info="1 is none.", minimum=0, min_width=140)
            temperature = gr.Number(own[1], label="Temperature", info="0 is argmax.", minimum=0, min_width=140)
            top_p = gr.Number(own[2], label="Top-p", info="1 keeps all codes.", minimum=0, maximum=1, min_width=140)
    fields.status()
    gallery = gr.Gallery(
        label="Pictures",
        columns=2,
        fit_columns=False,
        height=480,
        format="png",
        interactive=False,
        object_fit="contain",
        elem_id="pictures",
        elem_classes="pixelated" if small else None,
    )
    fields.link()

    @on_gpu(seconds=60)
    def generate(
        prompt: str,
        seed: float,
        new_seed: bool,
        model: str,
        count: float = 1,
        decoder: str = names[-1],
        guidance: float | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Draw pictures; yields previews on the way, and the pictures last."""
        chosen, text, number = checked(models, prompt, seed, new_seed, model)
        if count not in (1, 2, 3, 4) or number + count - 1 > LARGEST_SEED:
            raise gr.Error(
                f"Between 1 and 4 pictures can be drawn at once, got {count}: choose fewer, or another seed."
            )
        pipe = chosen.view()
        verifiers = {title: entry.verifier for title, entry in race_decoders(pipe)}
        if decoder not in verifiers:
            raise gr.Error(f"{decoder!r} can't be used with {chosen.name}: choose one of {', '.join(verifiers)}.")
        seeds = [number + index for index in range(int(count))]

        def work(report: Any) -> SpatialSpeculativePipelineOutput:
            pipe.verifier = with_sampling(verifiers[decoder], pipe.verifier)
            return pipe(
                [text] * len(seeds),
                generator=[torch.Generator().manual_seed(each) for each in seeds],
                guidance_scale=guidance,
                temperature=temperature,
                top_p=top_p,
                callback_on_step_end=_Preview(report),
            )

        yield "Waiting for the model.", number, gr.skip()
        progress = stream(work)
        try:
            while True:
                try:
                    made, left, images = next(progress)
                except StopIteration as finished:
                    output = finished.value
                    break
                shown = gr.skip() if images is None else _captioned(images, seeds)
                yield f"{made} passes, at most {left} left.", number, shown
        except (ValueError, RuntimeError) as error:
            raise in_words(error) from error
        finally:
            progress.close()
        stats = output.stats
        done = (
            f"{stats.nfe} passes for {stats.tokens} tokens per picture, {stats.seconds['total']:.2f} s with previews, "
            f"on {chosen.machine}."
        )
        yield done, number, _captioned(output.images, seeds)

    def settings_of(model: str) -> list[Any]:
        names, own = _choices(models[model])
        return [gr.Dropdown(names, value=names[-1]), *own]

    fields.model.change(settings_of, fields.model, [decoder, guidance, temperature, top_p], api_visibility="private")
    fields.connect(generate, [count, decoder, guidance, temperature, top_p], [gallery])
    return fields


def _choices(model: DemoModel) -> tuple[list[str], tuple[float, float, float]]:
    """Titles of the decoders that a model can run, and its own guidance scale, temperature and top-p."""
    backbone = model.pipe.adapter()
    sampling = model.pipe.verifier.sampling(backbone.recommended_sampling)
    names = [title for title, _ in race_decoders(model.pipe)]
    return names, (backbone.recommended_guidance_scale, sampling.temperature, sampling.top_p)


class _Preview:
    """A callback that reports passes, and decodes what is drawn so far as often as `PREVIEW_SHARE` allows."""

    def __init__(self, report: Any) -> None:
        self._report = report
        self._cost = self._last = 0.0

    def __call__(
        self, pipe: SpatialSpeculativePipeline, step: int, left: int, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        images, now = None, time.perf_counter()
        if left and now - self._last >= self._cost / PREVIEW_SHARE:
            images = pipe.decode_latents(tensors["latents"])
            self._last = time.perf_counter()
            self._cost = self._last - now
        if self._report((step + 1, left, images)):
            pipe._interrupt = True
        return {}


def _captioned(images: list[Any], seeds: list[int]) -> list[tuple[Any, str]]:
    return [(image, f"seed {seed}") for image, seed in zip(images, seeds, strict=True)]
