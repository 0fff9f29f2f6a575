"""The page: its tabs, links that open it with a prompt, and how it is served."""

from pathlib import Path
from typing import Any

import gradio as gr

from ssd_pipelines.demo.common import LARGEST_SEED, LONGEST_PROMPT, Fields
from ssd_pipelines.demo.generate_tab import generate_tab
from ssd_pipelines.demo.inside_tab import inside_tab
from ssd_pipelines.demo.models import DemoModel
from ssd_pipelines.demo.race_tab import race_tab
from ssd_pipelines.scenes import CHECKPOINT


TITLE = "Spatially speculative decoding"

QUEUE_LENGTH = 20
"""Visitors who may wait; further ones are told that the queue is full."""

CSS = """
.status { min-height: 1.6em; }
#pictures.pixelated img { image-rendering: pixelated; }
.gradio-container { max-width: 1100px !important; margin: 0 auto; }
"""

ANNOUNCE_STATUS = """() => {
  for (const line of document.querySelectorAll(".status")) { line.setAttribute("role", "status"); }
}"""


def create_app(models: list[DemoModel]) -> gr.Blocks:
    """The page for these models; the first one is chosen when it opens.

    Args:
        models: loaded with `load_model`.

    Example:
        >>> launch(create_app([load_model()]))
    """
    by_name = {model.name: model for model in models}
    embedded = any(Path(str(model.pipe.config.get("_name_or_path", ""))) == CHECKPOINT for model in models)
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(3600, 3600)) as app:
        gr.Markdown(
            f"# {TITLE}\nAutoregressive image models draw token by token. Draft heads propose rows of tokens, one "
            "pass verifies them all, and the picture stays the one that token-by-token decoding draws."
        )
        with gr.Tabs() as tabs:
            with gr.Tab("Race", id="race"):
                race = race_tab(by_name, embedded)
            with gr.Tab("Generate", id="generate"):
                generate = generate_tab(by_name)
            with gr.Tab("Look inside", id="inside"):
                inside = inside_tab(by_name)
        app.load(None, None, None, js=ANNOUNCE_STATUS)
        _open_links(app, tabs, [race, generate, inside])
    app.queue(max_size=QUEUE_LENGTH)
    return app


def launch(app: gr.Blocks, host: str | None = None, port: int | None = None, **options: Any) -> Any:
    """Serve the page: on this machine only unless `host` or the variable `GRADIO_SERVER_NAME` says otherwise.

    No file is served but the pictures that the page itself made, and uploads are refused above a kilobyte.

    Args:
        host, port: to listen on; by default 127.0.0.1, and the first free port from 7860 on.
        options: of `gr.Blocks.launch`.
    """
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    settings: dict[str, Any] = {"footer_links": ["api"], "ssr_mode": False, "max_file_size": "1kb", "allowed_paths": []}
    return app.launch(server_name=host, server_port=port, theme=theme, css=CSS, **{**settings, **options})


def _open_links(app: gr.Blocks, tabs: gr.Tabs, all_fields: list[Fields]) -> None:
    """A link's tab, prompt, seed and model are filled in when the page opens; what it can't hold is ignored."""

    def read(request: gr.Request) -> list[Any]:
        query = dict(request.query_params)
        chosen = next((fields for fields in all_fields if fields.tab == query.get("tab")), None)
        updates: list[Any] = [gr.skip()] * (1 + 3 * len(all_fields))
        if chosen is None:
            return updates
        updates[0] = gr.Tabs(selected=chosen.tab)
        place = 1 + 3 * all_fields.index(chosen)
        if query.get("prompt"):
            updates[place] = query["prompt"][:LONGEST_PROMPT]
        seed = query.get("seed", "")
        if seed.isdecimal() and int(seed) <= LARGEST_SEED:
            updates[place + 1] = int(seed)
        if query.get("model") in dict(chosen.model.choices):
            updates[place + 2] = query["model"]
        return updates

    outputs = [part for fields in all_fields for part in (fields.prompt, fields.seed, fields.model)]
    app.load(read, None, [tabs, *outputs], queue=False, api_visibility="private")
