"""Pictures with captions, and bar charts, as HTML: for any width, with text for screen readers."""

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

BARS_CSS = """
.bars { margin: 0; color: var(--body-text-color); }
.bars svg { display: block; width: 100%; height: 9rem; margin: .5rem 0 .25rem; border-bottom: 1px solid currentColor; }
.bars rect { fill: #ea580c; }
.bars p, .bars figcaption { font-size: .85rem; margin: 0; color: inherit; }
"""

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


def bars() -> gr.HTML:
    """A bar chart that fits any width; its value is what `to_bars` returns."""
    return gr.HTML(None, css_template=BARS_CSS, js_on_load=None, apply_default_css=False)


def to_bars(values: Sequence[float], title: str, name: str) -> str:
    """A bar chart as SVG.

    Args:
        values: one bar each, not negative.
        title: above the chart.
        name: what a bar is, for its tooltip and for screen readers, which get all values as text.
    """
    width, height, top = 100 / len(values), 30.0, max([*values, 1e-9])
    parts = []
    for index, value in enumerate(values):
        tall = height * value / top
        place = f'x="{index * width + 0.1 * width:.2f}" y="{height - tall:.2f}"'
        tooltip = f"<title>{name} {index + 1}: {value:.1f}</title>"
        parts.append(f'<rect {place} width="{0.8 * width:.2f}" height="{tall:.2f}">{tooltip}</rect>')
    told = ", ".join(f"{value:.1f}" for value in values)
    chart = (
        f'<svg viewBox="0 0 100 {height:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{title}. {name} 1 to {len(values)}: {told}">{"".join(parts)}</svg>'
    )
    scale = f"{name} 1 to {len(values)}; the longest bar is {top:.1f}"
    return f'<figure class="bars"><figcaption>{title}</figcaption>{chart}<p>{scale}</p></figure>'


def _data_url(picture: Image.Image) -> str:
    if picture.width <= SMALL:  # a browser would blur it
        factor = -(-384 // picture.width)
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
