"""Pictures with captions in a grid, as HTML: with whole captions, and sharp if they are small."""

import base64
import io
from collections.abc import Sequence

import gradio as gr
from PIL import Image


SMALL = 128
"""Width in pixels up to which the pixels of a picture are shown as they are."""

TEMPLATE = """<div class="figures">{{#each value}}<figure>
<img src="{{this.source}}" alt="{{this.caption}}"><figcaption>{{this.caption}}</figcaption>
</figure>{{/each}}</div>"""

CSS = """
.figures { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(11rem, 44%), 1fr)); }
.figures figure { margin: 0; }
.figures img { width: 100%; border-radius: .3rem; display: block; }
.figures figcaption { font-size: .85rem; margin-top: .3rem; color: var(--body-text-color); }
"""


def figures(label: str) -> gr.HTML:
    """The component; its value is what `to_figures` returns."""
    return gr.HTML(
        None, html_template=TEMPLATE, css_template=CSS, js_on_load=None, apply_default_css=False, label=label
    )


def to_figures(pictures: Sequence[tuple[Image.Image, str]]) -> list[dict[str, str]]:
    """Pictures and captions as the component's value."""
    return [{"source": _data_url(picture), "caption": caption} for picture, caption in pictures]


def _data_url(picture: Image.Image) -> str:
    if picture.width <= SMALL:  # a browser would blur it
        factor = -(-384 // picture.width)
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
