"""The race: decoders draw the same prompt with the same seed, recorded one by one and replayed on one clock."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr

from ssd_pipelines.demo.common import Fields, checked, in_words
from ssd_pipelines.demo.models import DemoModel, on_gpu
from ssd_pipelines.demo.streaming import stream
from ssd_pipelines.race import Race, RaceStopped, race_decoders, race_to_dict, record_race


HERE = Path(__file__).parent


@lru_cache
def recorded_examples() -> dict[str, dict[str, Any]]:
    """Races of the embedded model that come with the package, by prompt; `ssd-pipelines race -o x.json` writes them."""
    found = {}
    for path in sorted((HERE / "examples").glob("*.json")):
        race = json.loads(path.read_text("utf-8"))
        found[race["prompt"]] = race
    return found


def player(value: dict[str, Any] | None) -> gr.HTML:
    """The component that replays a race."""
    return gr.HTML(
        value,
        html_template=(HERE / "player.html").read_text("utf-8"),
        css_template=(HERE / "player.css").read_text("utf-8"),
        js_on_load=(HERE / "player.js").read_text("utf-8"),
        apply_default_css=False,
        elem_id="race-player",
    )


def race_tab(models: dict[str, DemoModel], with_examples: bool) -> Fields:
    """Build the tab."""
    examples = recorded_examples() if with_examples else {}
    gr.Markdown(
        "Decoders draw the same prompt with the same seed. Cells of the token grid appear as they are drafted, "
        "corrected and made final."
    )
    shown = player(next(iter(examples.values()), None))
    if examples:
        gr.Markdown("Recorded races:")
        with gr.Row():
            buttons = [(gr.Button(prompt, size="sm", min_width=120), race) for prompt, race in examples.items()]
    fields = Fields(models, "Record a race", "race")
    status = fields.status()
    fields.link()

    @on_gpu(seconds=120)
    def race(prompt: str, seed: float, new_seed: bool, model: str) -> Iterator[tuple[Any, ...]]:
        """Record all decoders; the last yield has the race."""
        chosen, text, number = checked(models, prompt, seed, new_seed, model)
        pipe = chosen.view()
        decoders = race_decoders(pipe)
        order = [title for title, _ in decoders]

        def work(report: Any) -> Race:
            def on_pass(title: str, made: int, left: int) -> bool:
                return report((title, made, left))

            return record_race(pipe, decoders, text, number, model=chosen.name, machine=chosen.machine, on_pass=on_pass)

        yield "Waiting for the model.", number, gr.skip()
        progress = stream(work)
        try:
            while True:
                try:
                    title, made, left = next(progress)
                except StopIteration as finished:
                    recorded = finished.value
                    break
                place = f"{order.index(title) + 1} of {len(order)}"
                yield f"Recording {title} ({place}): {made} passes, at most {left} left.", number, gr.skip()
        except RaceStopped:
            yield "Stopped.", number, gr.skip()
            return
        except (ValueError, RuntimeError) as error:
            raise in_words(error) from error
        finally:
            progress.close()
        yield _summary(recorded), number, race_to_dict(recorded)

    fields.connect(race, [], [shown])
    if examples:
        for button, recorded in buttons:
            button.click(
                lambda recorded=recorded: (recorded, recorded["prompt"], recorded["seed"], False, ""),
                None,
                [shown, fields.prompt, fields.seed, fields.random, status],
                queue=False,
                api_visibility="private",
            )
    return fields


def _summary(race: Race) -> str:
    parts = [f"{recording.title} {len(recording.passes)}" for recording in race.recordings]
    return f"Recorded. Passes: {', '.join(parts)}."
