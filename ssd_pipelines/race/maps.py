"""Maps over the token grid of a recording: values per cell over its picture, and what differs from another picture."""

import numpy as np
from PIL import Image, ImageDraw

from ssd_pipelines.race.recording import Recording


HEAT = np.array([234, 88, 12], np.float32)


def cell_map(recording: Recording, values: np.ndarray, size: int = 384, largest: float | None = None) -> Image.Image:
    """The final picture in grey, with each cell the more orange the larger its value.

    Args:
        values: `(rows, columns)`, not negative.
        size: width of the result in pixels.
        largest: the value of the strongest colour; by default the largest of `values`.

    Raises:
        ValueError: for values of another shape.
    """
    if values.shape != (recording.rows, recording.columns):
        raise ValueError(f"`values` must be of shape {(recording.rows, recording.columns)}, got {values.shape}.")
    picture = np.asarray(_enlarged(recording, size).convert("L"), np.float32)[..., None] * 0.5 + 110
    top = max(float(values.max() if largest is None else largest), 1e-9)
    strength = Image.fromarray(np.clip(values / top, 0, 1).astype(np.float32) * 0.85)
    alpha = np.asarray(strength.resize((picture.shape[1], picture.shape[0]), Image.Resampling.NEAREST))[..., None]
    return Image.fromarray((picture * (1 - alpha) + HEAT * alpha).astype(np.uint8))


def difference_map(recording: Recording, reference: Recording, size: int = 384) -> tuple[Image.Image, int]:
    """The final picture, with a frame around each cell whose code is another one than in the reference.

    Returns:
        the map, and the number of such cells.

    Raises:
        ValueError: if the two have token grids of different sizes.
    """
    if (recording.rows, recording.columns) != (reference.rows, reference.columns):
        raise ValueError("Only recordings with the same token grid can be compared.")
    differs = recording.after(len(recording.passes))[0] != reference.after(len(reference.passes))[0]
    picture = _enlarged(recording, size).copy()
    draw, cell = ImageDraw.Draw(picture), size / recording.columns
    for row, column in np.argwhere(differs).tolist():
        box = (column * cell, row * cell, (column + 1) * cell - 1, (row + 1) * cell - 1)
        draw.rectangle(box, outline=tuple(HEAT.astype(int).tolist()), width=2)
    return picture, int(differs.sum())


def _enlarged(recording: Recording, size: int) -> Image.Image:
    picture = recording.pictures[len(recording.passes) - 1].convert("RGB")
    scale = Image.Resampling.NEAREST if picture.width * 2 <= size else Image.Resampling.LANCZOS
    return picture.resize((size, round(size * recording.rows / recording.columns)), scale)
