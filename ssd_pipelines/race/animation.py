"""A race as an animation: decoders side by side on one clock, written as GIF or MP4."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from diffusers.utils import export_to_video
from PIL import Image, ImageDraw

from ssd_pipelines.pictures import fitting_font, save_gif
from ssd_pipelines.race.recording import Race, Recording


EMPTY, GRID, TEXT, FAINT = "#e8eaef", "#d3d7df", "#14171f", "#626a78"
DRAFT, CHANGED, DONE = (37, 99, 235), (234, 88, 12), "#15803d"
LEGEND = ((EMPTY, "no token yet"), ("#9db7f3", "draft token"), ("#f3a172", "replaced by this pass"))
MARGIN, LINE = 16, 22


def draw_cells(recording: Recording, passes: int, size: int) -> Image.Image:
    """The picture after some passes, with the state of each cell drawn over it.

    Final cells show the picture alone. Draft tokens are tinted blue, those that the last pass replaced are orange, and
    cells without a token are grey.

    Args:
        passes: how many passes are done; 0 for an empty grid.
        size: of the result, in pixels.
    """
    rows, columns = recording.rows, recording.columns
    height = round(size * rows / columns)
    canvas = Image.new("RGB", (size, height), EMPTY)
    codes, final = recording.after(passes)
    if passes:
        shown = max((index for index in recording.pictures if index < passes), default=None)
        if shown is not None:
            picture = recording.pictures[shown]
            scale = Image.Resampling.NEAREST if picture.width * 2 <= size else Image.Resampling.LANCZOS
            drawn = Image.fromarray(((recording.after(shown + 1)[0] >= 0) * 255).astype(np.uint8))
            canvas.paste(picture.resize((size, height), scale), mask=drawn.resize((size, height), _NEAREST))
    tint = np.zeros((rows, columns, 4), np.uint8)
    tint[(codes >= 0) & ~final] = (*DRAFT, 90)
    if passes and passes < len(recording.passes):
        tint[recording.changed_by(passes - 1)] = (*CHANGED, 170)
    layer = Image.fromarray(tint, "RGBA").resize((size, height), _NEAREST)
    canvas.paste(layer, mask=layer)
    cell = size / columns
    if cell >= 6:
        draw = ImageDraw.Draw(canvas)
        for row, column in np.argwhere(~final).tolist():
            draw.rectangle((column * cell, row * cell, (column + 1) * cell, (row + 1) * cell), outline=GRID)
    return canvas


def draw_frame(race: Race, seconds: float, size: int = 200, note: str = "") -> Image.Image:
    """All decoders at one moment of the race.

    Args:
        seconds: since each decoder started.
        size: of each picture, in pixels.
        note: a line at the bottom, after the legend.
    """
    first = race.recordings[0]
    height = round(size * first.rows / first.columns)
    width = MARGIN + len(race.recordings) * (size + MARGIN)
    frame = Image.new("RGB", (width, 4 * MARGIN + height + 5 * LINE), "white")
    draw = ImageDraw.Draw(frame)

    def write(x: float, y: float, text: str, points: int, room: float, colour: str = TEXT) -> None:
        draw.text((x, y), text, font=fitting_font(text, room, points), fill=colour, anchor="lm")

    write(MARGIN, MARGIN + LINE / 2, f"{race.prompt} · seed {race.seed}", 18, width - 2 * MARGIN)
    for index, recording in enumerate(race.recordings):
        left, top = MARGIN + index * (size + MARGIN), 2 * MARGIN + LINE
        passes, total = recording.passes_until(seconds), len(recording.passes)
        done = passes == total
        write(left, top + LINE / 2, recording.title, 16, size)
        frame.paste(draw_cells(recording, passes, size), (left, top + LINE))
        below = top + LINE + height + LINE * 0.8
        clock = f"pass {passes} of {total} · {min(seconds, recording.seconds):.2f} s"
        write(left, below, clock, 15, size, DONE if done else TEXT)
        if done and index:
            same = "same codes as the first" if recording.matches_reference else "differs from the first"
            write(left, below + LINE, same, 13, size, FAINT)
    x = float(MARGIN)
    for colour, text in LEGEND:
        draw.rectangle((x, frame.height - MARGIN - 6, x + 12, frame.height - MARGIN + 6), fill=colour, outline=GRID)
        write(x + 18, frame.height - MARGIN, text, 13, width, FAINT)
        x += 34 + fitting_font(text, width, 13).getlength(text)
    write(x, frame.height - MARGIN, note, 13, max(width - MARGIN - x, 1), FAINT)
    return frame


def frames(race: Race, length: float = 8.0, hold: float = 2.0, fps: int = 15, size: int = 200) -> Iterator[Image.Image]:
    """The frames of an animation in which the slowest decoder takes `length` seconds.

    Args:
        length: seconds of the race; the clock runs faster or slower than it did, and the frames say so.
        hold: seconds that the last frame stays.
        fps: frames per second.
        size: of each picture, in pixels.
    """
    slowest = max(recording.seconds for recording in race.recordings)
    where = " · ".join(part for part in (race.model, race.machine) if part)
    note = f"recorded one after the other, replayed at {slowest / length:.2g} times the speed" + (
        f" · {where}" if where else ""
    )
    count = max(2, round(length * fps))
    for index in range(count):
        yield draw_frame(race, slowest * index / (count - 1), size, note)
    for _ in range(round(hold * fps)):
        yield draw_frame(race, slowest, size, note)


def write_animation(
    race: Race, path: Path, length: float = 8.0, hold: float = 2.0, fps: int = 15, size: int = 200
) -> None:
    """Write a race as `.gif` or `.mp4`; see `frames`.

    Raises:
        ValueError: for another ending.
        ImportError: for MP4 without imageio-ffmpeg, which comes with the extra "demo".
    """
    check_ending(path)
    images = list(frames(race, length, hold, fps, size))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".gif":
        # One palette for all frames: colours chosen per frame would flicker.
        palette = images[-1].quantize(128, dither=Image.Dither.NONE)
        settings = {"prompt": race.prompt, "seed": race.seed, "model": race.model, "machine": race.machine}
        save_gif([_palette(image, palette) for image in images], path, 1000 // fps, settings)
        return
    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise ImportError('MP4 needs imageio-ffmpeg: pip install "ssd-pipelines[demo]", or write a .gif.') from error
    export_to_video(images, str(path), fps, macro_block_size=2)


def check_ending(path: Path) -> None:
    """Refuse a file name that is neither a GIF nor an MP4.

    Raises:
        ValueError: saying what is allowed.
    """
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise ValueError(f"An animation is a .gif or .mp4 file, got {path}.")


def _palette(image: Image.Image, palette: Image.Image) -> Image.Image:
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


_NEAREST = Image.Resampling.NEAREST
