"""A race as JSON that a page replays: per pass the cells that changed, and small pictures in one sheet per decoder."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssd_pipelines.race.recording import Race, Recording


VERSION = 1
FINAL, REPLACED = 1, 2
SHEET_COLUMNS = 8


def race_to_dict(race: Race, tile: int = 192) -> dict[str, Any]:
    """What the page's player reads.

    Args:
        tile: the largest width of a picture, in pixels.

    Returns:
        `lanes` has one entry per decoder: `seconds`, the time after each pass; `changes`, for each pass a list of
        `4 * cell + flags` with the flags `FINAL` and `REPLACED` (the pass put another code there); `codes`, the final
        codes; `sheet`, the pictures after the passes in `shown` as a WebP data URL, `SHEET_COLUMNS` in a row.
    """
    return {
        "version": VERSION,
        "prompt": race.prompt,
        "seed": race.seed,
        "model": race.model,
        "machine": race.machine,
        "rows": race.recordings[0].rows,
        "columns": race.recordings[0].columns,
        "lanes": [_lane(recording, tile) for recording in race.recordings],
    }


def write_replay(race: Race, path: Path) -> None:
    """Write `race_to_dict(race)` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(race_to_dict(race), separators=(",", ":")), "utf-8")


def _lane(recording: Recording, tile: int) -> dict[str, Any]:
    codes = np.full(recording.rows * recording.columns, -1, np.int64)
    changes = []
    for record in recording.passes:
        replaced = (codes[record.cells] >= 0) & (codes[record.cells] != record.codes)
        changes.append((4 * record.cells + FINAL * record.final + REPLACED * replaced).tolist())
        codes[record.cells] = record.codes
    shown = sorted(recording.pictures)
    sheet, width, height = _sheet([recording.pictures[index] for index in shown], tile)
    return {
        "title": recording.title,
        "lossless": recording.lossless,
        "matches": recording.matches_reference,
        "seconds": [round(record.seconds, 5) for record in recording.passes],
        "changes": changes,
        "codes": codes.tolist(),
        "shown": shown,
        "sheet": sheet,
        "width": width,
        "height": height,
    }


def _sheet(pictures: list[Image.Image], tile: int) -> tuple[str, int, int]:
    """All pictures in one, as a data URL, and the size of each."""
    width = min(tile, pictures[0].width)
    height = round(width * pictures[0].height / pictures[0].width)
    rows = -(-len(pictures) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (SHEET_COLUMNS * width, rows * height))
    for index, picture in enumerate(pictures):
        at = (index % SHEET_COLUMNS * width, index // SHEET_COLUMNS * height)
        sheet.paste(picture.resize((width, height), Image.Resampling.LANCZOS), at)
    file = io.BytesIO()
    sheet.save(file, "WEBP", quality=90, lossless=width <= 96)  # small pictures are enlarged, which shows artifacts
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}", width, height
