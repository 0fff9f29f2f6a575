"""Picture files: PNGs that store the settings they were generated with, and sheets of pictures with captions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageSequence
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


def save_gif(images: Sequence[Image.Image], path: Path, duration: int | list[int], settings: dict[str, Any]) -> None:
    """Write an animated GIF with `settings` as JSON in its comment.

    Args:
        images: the frames.
        path: file to write; missing parent folders are created.
        duration: of each frame in milliseconds; a list has one per frame.
        settings: as for `save_png`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    comment = json.dumps({METADATA_KEY: settings}, sort_keys=True)
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=duration, loop=0, optimize=False, comment=comment
    )


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a picture that `save_png` or `save_gif` wrote.

    Raises:
        ValueError: if the file can't be read as a picture, or holds no settings.
    """
    try:
        with Image.open(path) as image:
            text = getattr(image, "text", {}).get(METADATA_KEY)
            comment = image.info.get("comment", b"") if image.format == "GIF" else b""
    except OSError as error:
        raise ValueError(f"{path} can't be read as a picture: {error}.") from error
    if text is None and comment.startswith(f'{{"{METADATA_KEY}"'.encode()):
        return json.loads(comment)[METADATA_KEY]
    if text is None:
        raise ValueError(f"{path} carries no settings: only pictures by `ssd-pipelines generate` and `race` do.")
    return json.loads(text)


def copy_picture(path: Path, target: Path, settings: dict[str, Any]) -> Path:
    """Copy a PNG or an animated GIF with other settings.

    Args:
        path: the picture.
        target: path of the copy without its ending.
        settings: what the copy contains, as for `save_png`.

    Returns:
        path of the copy.
    """
    with Image.open(path) as image:
        if image.format != "GIF":
            copied = target.with_suffix(".png")
            save_png(image.convert("RGB"), copied, settings)
            return copied
        copied, frames, durations = target.with_suffix(".gif"), [], []
        for frame in ImageSequence.Iterator(image):
            frames.append(frame.copy())
            durations.append(frame.info["duration"])
        save_gif(frames, copied, durations, settings)
    return copied


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
