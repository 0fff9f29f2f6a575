"""Picture files: PNGs that store the settings they were generated with, and sheets of pictures with captions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo


METADATA_KEY = "ssd_pipelines"


def save_png(image: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """Write a PNG with `settings` as JSON in one text chunk, and the plain prompt in another one.

    Args:
        image: the picture.
        path: file to write; missing parent folders are created.
        settings: anything that JSON can hold; `settings["prompt"]` is the prompt.
    """
    info = PngInfo()
    info.add_itxt(METADATA_KEY, json.dumps(settings, sort_keys=True))
    info.add_itxt("prompt", str(settings.get("prompt", "")))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, pnginfo=info)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a PNG that `save_png` wrote.

    Raises:
        ValueError: if the file can't be read as a picture, or holds no settings.
    """
    try:
        with Image.open(path) as image:
            text = getattr(image, "text", {}).get(METADATA_KEY)
    except OSError as error:
        raise ValueError(f"{path} can't be read as a picture: {error}.") from error
    if text is None:
        raise ValueError(f"{path} carries no settings: only pictures written by `ssd-pipelines generate` do.")
    return json.loads(text)


def side_by_side(pictures: Sequence[tuple[Image.Image, Sequence[str]]], title: str, size: int = 320) -> Image.Image:
    """A sheet with pictures in a row, their caption lines below them, and a title above.

    Args:
        pictures: pairs of a picture and its caption lines.
        title: heading of the sheet.
        size: side of each picture on the sheet, in pixels.
    """
    margin, line = 24, 26
    lines = max(len(caption) for _, caption in pictures)
    width = margin + len(pictures) * (size + margin)
    sheet = Image.new("RGB", (width, 3 * margin + size + lines * line + margin), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((width / 2, margin), title, font=fitting_font(title, width - 2 * margin, 20), fill="black", anchor="mm")
    for index, (picture, caption) in enumerate(pictures):
        left, top = margin + index * (size + margin), 2 * margin
        scale = Image.Resampling.NEAREST if picture.width * 2 <= size else Image.Resampling.LANCZOS
        sheet.paste(picture.convert("RGB").resize((size, size), scale), (left, top))
        draw.rectangle((left - 1, top - 1, left + size, top + size), outline="#999999")
        for row, text in enumerate(caption):
            place = (left + size / 2, top + size + margin * 0.75 + row * line)
            colour = "black" if row == 0 else "#555555"
            draw.text(place, text, font=fitting_font(text, size, 17), fill=colour, anchor="mm")
    return sheet


def fitting_font(text: str, width: float, points: int) -> Any:
    """Pillow's own font, at most `points` large and small enough for the text to fit into `width` pixels."""
    while points > 8 and ImageFont.load_default(points).getlength(text) > width:
        points -= 1
    return ImageFont.load_default(points)
