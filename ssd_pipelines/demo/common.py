"""What the tabs share: prompt and seed fields, checks of what a visitor typed, links to a result."""

import random
from collections.abc import Callable
from typing import Any

import gradio as gr

from ssd_pipelines.demo.models import DemoModel


QUEUE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model"}
"""For events that run a model: one at a time, since two at once slow each other down and falsify the clock."""

LARGEST_SEED = 2**31 - 1
LONGEST_PROMPT = 500

LINK = """(prompt, seed, model) => {
  const url = new URL(window.location.href);
  url.search = new URLSearchParams({ tab: "TAB", prompt, seed, model }).toString();
  try { window.history.replaceState(null, "", url); } catch (error) { /* inside a frame of another page */ }
  return url.toString();
}"""


class Fields:
    """Prompt, model and seed of a tab, with a button that runs, one that stops, a status line and a link."""

    def __init__(self, models: dict[str, DemoModel], run: str, tab: str) -> None:
        first = next(iter(models.values()))
        self.tab = tab
        self.prompt = gr.Textbox(first.examples[0], label="Prompt", info=first.hint, max_length=LONGEST_PROMPT, lines=1)
        self.model = gr.Dropdown(list(models), value=first.name, label="Model", visible=len(models) > 1)
        with gr.Row(equal_height=True):
            self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, min_width=120)
            self.random = gr.Checkbox(False, label="New seed for each run", min_width=120)
        with gr.Row():
            self.run = gr.Button(run, variant="primary", min_width=120)
            self.stop = gr.Button("Stop", min_width=120)

    def status(self) -> gr.Markdown:
        """A line that screen readers announce when it changes; create it where it should be on the page."""
        self.status_line = gr.Markdown("", elem_classes="status", elem_id=f"{self.tab}-status")
        return self.status_line

    def link(self) -> gr.Textbox:
        """The address that brings this tab, prompt and seed back."""
        self.link_box = gr.Textbox(
            label="Link to this", interactive=False, buttons=["copy"], max_lines=1, elem_id=f"{self.tab}-link"
        )
        return self.link_box

    def connect(self, function: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> None:
        """Run on the button or Enter, stop on the other button, then write the link.

        Args:
            function: generator of the visitor's event; its API name is the tab's.
            inputs: further inputs after prompt, seed, random and model.
            outputs: after the status line and the seed.
        """
        given = [self.prompt, self.seed, self.random, self.model, *inputs]
        made = [self.status_line, self.seed, *outputs]
        events = [
            trigger(function, given, made, api_name=name, api_visibility=visible, show_progress="minimal", **QUEUE)
            for trigger, name, visible in (
                (self.run.click, self.tab, "public"),
                (self.prompt.submit, f"{self.tab}_enter", "private"),
            )
        ]
        for event in events:
            link = LINK.replace("TAB", self.tab)
            event.success(None, [self.prompt, self.seed, self.model], self.link_box, js=link, api_visibility="private")
        stopped = self.stop.click(None, None, None, cancels=events, queue=False, api_visibility="private")
        # Only after the cancelled event has sent its last progress.
        stopped.then(lambda: "Stopped.", None, self.status_line, queue=False, api_visibility="private")


def checked(
    models: dict[str, DemoModel], prompt: str, seed: float | None, new_seed: bool, model: str
) -> tuple[DemoModel, str, int]:
    """The model, prompt and seed of a visitor's call.

    Raises:
        gr.Error: in words that the page shows.
    """
    if model not in models:
        raise gr.Error(f"There is no model {model!r} here: choose one of {', '.join(models)}.")
    chosen = models[model]
    text = (prompt or "").strip()
    if not text:
        raise gr.Error(f'The prompt is empty: say what to draw, for instance "{chosen.examples[0]}".')
    if len(text) > LONGEST_PROMPT:
        raise gr.Error(f"The prompt has {len(text)} characters: shorten it to {LONGEST_PROMPT}.")
    if new_seed:
        seed = random.SystemRandom().randrange(LARGEST_SEED + 1)
    if seed is None or seed != int(seed) or not 0 <= seed <= LARGEST_SEED:
        raise gr.Error(f"The seed must be a whole number from 0 to {LARGEST_SEED}, got {seed}.")
    problem = chosen.prompt_error(text)
    if problem is not None:
        gr.Warning(problem)
    return chosen, text, int(seed)


def in_words(error: Exception) -> gr.Error:
    """An error of the library as one that the page shows."""
    return gr.Error(str(error) or type(error).__name__)
