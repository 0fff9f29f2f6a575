"""A look inside one decoder: rounds by row, where drafts were corrected, drafts before correction, what is lost."""

from collections.abc import Iterator
from typing import Any

import gradio as gr
from PIL import Image

from ssd_pipelines.demo.common import Fields, checked, in_words
from ssd_pipelines.demo.figures import bars, figures, to_bars, to_figures
from ssd_pipelines.demo.models import DemoModel, on_gpu
from ssd_pipelines.demo.streaming import stream
from ssd_pipelines.evaluation.decoders import Decoder
from ssd_pipelines.race import RaceStopped, Recording, cell_map, difference_map, race_decoders, record_race
from ssd_pipelines.verifiers import SpatialDraftVerifier


SIZE = 384


def inside_tab(models: dict[str, DemoModel]) -> Fields:
    """Build the tab."""
    gr.Markdown("How one decoder draws a picture, and how that picture differs from the autoregressive one.")
    fields = Fields(models, "Inspect", "inside")
    first = next(iter(models.values()))
    names = [title for title, _ in race_decoders(first.pipe)][1:]
    decoder = gr.Dropdown(names, value=names[-1], label="Decoder")
    fields.status()
    maps = figures("The picture and maps over it")
    rows = bars()
    with gr.Column(visible=first.pipe.heads is not None):
        gr.Markdown(
            "Drafts before correction: the paper's algorithm with 0, 1 and 2 rounds, and autoregressive decoding."
        )
        drafts = figures("Drafts before correction")
    fields.link()

    @on_gpu(seconds=120)
    def inside(
        prompt: str, seed: float, new_seed: bool, model: str, decoder: str = names[-1]
    ) -> Iterator[tuple[Any, ...]]:
        """Record a decoder, autoregressive decoding and drafts; yields what was found last."""
        chosen, text, number = checked(models, prompt, seed, new_seed, model)
        pipe = chosen.view()
        known = dict(race_decoders(pipe))
        if decoder not in known:
            raise gr.Error(f"{decoder!r} can't be used with {chosen.name}: choose one of {', '.join(known)}.")
        lanes = [next(iter(known.items())), (decoder, known[decoder])]
        if pipe.heads is not None:
            lanes += [
                (
                    f"{rounds} rounds" if rounds != 1 else "1 round",
                    Decoder("", "", SpatialDraftVerifier.paper(rounds=rounds)),
                )
                for rounds in (0, 1, 2)
            ]

        def work(report: Any) -> tuple[Recording, ...]:
            def on_pass(title: str, made: int, left: int) -> bool:
                return report((title, made))

            return record_race(pipe, lanes, text, number, max_pictures=1, on_pass=on_pass).recordings

        nothing = gr.skip(), gr.skip(), gr.skip()
        yield "Waiting for the model.", number, *nothing
        progress = stream(work)
        try:
            while True:
                try:
                    title, made = next(progress)
                except StopIteration as finished:
                    recordings = finished.value
                    break
                yield f"Recording {title}: {made} passes.", number, *nothing
        except RaceStopped:
            yield "Stopped.", number, *nothing
            return
        except (ValueError, RuntimeError) as error:
            raise in_words(error) from error
        finally:
            progress.close()
        reference, recording, *paper = recordings
        pictures, differing = _maps(recording, reference)
        cells = recording.rows * recording.columns
        status = f"{recording.title}: {len(recording.passes)} passes instead of {len(reference.passes)}. " + (
            "No code differs from autoregressive decoding with this seed."
            if not differing
            else f"{differing} of {cells} codes differ from autoregressive decoding with this seed."
        )
        kept = [(_final(lane), f"{lane.title}, {len(lane.passes)} passes") for lane in paper]
        kept.append((_final(reference), f"autoregressive, {len(reference.passes)} passes"))
        title = "Passes from the first draft of a token to its final code, mean of each row"
        rows_chart = to_bars(recording.rounds().mean(1).tolist(), title, "row")
        yield status, number, to_figures(pictures), rows_chart, to_figures(kept)

    fields.connect(inside, [decoder], [maps, rows, drafts])
    return fields


def _maps(recording: Recording, reference: Recording) -> tuple[list[tuple[Image.Image, str]], int]:
    changed, rounds = recording.corrections(), recording.rounds()
    difference, differing = difference_map(recording, reference, SIZE)
    pictures = [
        (_final(recording), f"{recording.title}, {len(recording.passes)} passes"),
        (cell_map(recording, changed, SIZE), f"Corrections per token: 0 (grey) to {changed.max()} (orange)"),
        (cell_map(recording, rounds, SIZE), f"Passes from draft to final: 0 (grey) to {rounds.max()} (orange)"),
        (difference, f"Different from autoregressive: {differing} codes (framed)"),
    ]
    return pictures, differing


def _final(recording: Recording) -> Image.Image:
    return recording.pictures[len(recording.passes) - 1]
