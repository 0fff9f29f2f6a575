"""Scene renderer: anti-aliased signed-distance shapes on a plain or patterned background, 64x64 pixels."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from PIL import Image


IMAGE_SIZE = 64

Shape = Literal["circle", "square", "triangle", "diamond", "ring", "cross"]
Colour = Literal["red", "orange", "yellow", "green", "blue", "purple"]
BackgroundColour = Literal["white", "beige", "silver", "grey", "black"]
Pattern = Literal["plain", "stripes", "planks", "checks", "dots", "tiles"]

OBJECT_RGB: dict[str, tuple[int, int, int]] = {
    "red": (222, 36, 36),
    "orange": (244, 128, 8),
    "yellow": (240, 222, 36),
    "green": (20, 164, 60),
    "blue": (36, 84, 216),
    "purple": (150, 40, 190),
}
# Backgrounds are close to grey, so that saturation alone separates objects from the background.
BACKGROUND_RGB: dict[str, tuple[int, int, int]] = {
    "white": (248, 248, 248),
    "beige": (222, 212, 190),
    "silver": (190, 190, 190),
    "grey": (110, 110, 110),
    "black": (30, 30, 30),
}

RING_HOLE = 0.5
"""Inner radius of a ring divided by its outer radius."""
CROSS_ARM = 0.36
"""Width of a cross's arm divided by its size."""


@dataclass(frozen=True)
class SceneObject:
    """One object: `size` is the side of its bounding box, (`x`, `y`) the box's centre, all in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    size: float


@dataclass(frozen=True)
class Background:
    """A background of one colour, or of two in a pattern.

    Every pattern consists of whole 4x4 pixel cells (dots: of quarter discs), the patch of one image token. So the image
    tokenizer needs few codes for it, regardless of its position and size.

    Args:
        pattern: `plain`; `stripes` of equal width; `planks`, stripes of uneven width; `checks`; `dots` on a lattice;
            `tiles`, 8x8 pixel tiles of either colour at random.
        base: main colour.
        accent: second colour (unused by `plain`).
        horizontal: direction of stripes and planks.
        cell: width of a stripe or check, or distance of dots, in units of 4 pixels.
        shift: offset of the pattern, (x, y) in units of 4 pixels.
        cells: random cells with the accent colour: 16 booleans for `planks`, one per row or column of cells; 81 for
            `tiles`, row by row.
    """

    pattern: str = "plain"
    base: str = "white"
    accent: str = "silver"
    horizontal: bool = True
    cell: int = 2
    shift: tuple[int, int] = (0, 0)
    cells: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A background and the objects on it, drawn in this order."""

    background: Background
    objects: tuple[SceneObject, ...]


def signed_distance(shape: str, dx: np.ndarray, dy: np.ndarray, size: float) -> np.ndarray:
    """Distance in pixels to the outline of a shape centred at (0, 0), negative inside.

    Args:
        shape: one of the six shapes.
        dx, dy: coordinates in pixels that broadcast, y downwards.
        size: side of the shape's bounding box in pixels.

    Raises:
        ValueError: for an unknown shape.
    """
    r = size / 2
    if shape == "circle":
        return np.hypot(dx, dy) - r
    if shape == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - r
    if shape == "diamond":
        # A third of a pixel wider: otherwise the outline runs through pixel centres, and these pixels are half covered.
        return (np.abs(dx) + np.abs(dy) - r - 0.35) * np.float32(np.sqrt(0.5))
    if shape == "ring":
        radius = np.hypot(dx, dy)
        return np.maximum(radius - r, r * RING_HOLE - radius)
    if shape == "cross":
        ax, ay, arm = np.abs(dx), np.abs(dy), size * CROSS_ARM / 2
        return np.minimum(np.maximum(ax - r, ay - arm), np.maximum(ax - arm, ay - r))
    if shape == "triangle":
        # Apex at the top; the base is as wide as the triangle is high, so the sides have slope 2.
        side = (2 * np.abs(dx) - (dy + r)) / np.float32(np.sqrt(5.0))
        return np.maximum(side, dy - r)
    raise ValueError(f"Unknown shape {shape!r}; known: circle, square, triangle, diamond, ring, cross.")


@lru_cache(maxsize=4096)
def coverage(shape: str, size: float, fraction_x: float, fraction_y: float) -> np.ndarray:
    """Share of each pixel that a shape covers, float32 (n, n); its centre is at pixel n // 2 plus the fractions."""
    half = int(np.ceil(size / 2)) + 2
    axis = np.arange(-half, half + 1, dtype=np.float32) + 0.5
    dx, dy = (axis - fraction_x)[None, :], (axis - fraction_y)[:, None]
    alpha = np.clip(0.5 - signed_distance(shape, dx, dy, size), 0.0, 1.0).astype(np.float32)
    alpha.setflags(write=False)
    return alpha


def background_cells(background: Background) -> np.ndarray:
    """Which 4x4 pixel cells have the accent colour, bool (16, 16).

    Raises:
        ValueError: for a pattern without such cells.
    """
    side = IMAGE_SIZE // 4
    rows, columns = np.mgrid[0:side, 0:side]
    rows, columns = rows + background.shift[1], columns + background.shift[0]
    if background.pattern == "stripes":
        return ((rows if background.horizontal else columns) // background.cell) % 2 == 1
    if background.pattern == "checks":
        return (rows // background.cell + columns // background.cell) % 2 == 1
    if background.pattern == "planks":
        line = np.asarray(background.cells, dtype=bool)
        return np.broadcast_to(line[:, None] if background.horizontal else line[None, :], (side, side))
    if background.pattern == "tiles":
        return np.asarray(background.cells, dtype=bool).reshape(9, 9)[rows // 2 % 9, columns // 2 % 9]
    raise ValueError(f"Unknown pattern {background.pattern!r}.")


def _draw_background(background: Background) -> np.ndarray:
    base = np.asarray(BACKGROUND_RGB[background.base], dtype=np.float32)
    pixels = np.broadcast_to(base, (IMAGE_SIZE, IMAGE_SIZE, 3)).copy()
    if background.pattern == "plain":
        return pixels
    accent = np.asarray(BACKGROUND_RGB[background.accent], dtype=np.float32)
    if background.pattern == "dots":
        period = 4 * background.cell
        axis = np.arange(IMAGE_SIZE, dtype=np.float32) + 0.5
        dx = (axis + 4 * background.shift[0] + period / 2) % period - period / 2
        dy = (axis + 4 * background.shift[1] + period / 2) % period - period / 2
        alpha = np.clip(0.5 - (np.hypot(dx[None, :], dy[:, None]) - 3.0), 0.0, 1.0)[..., None]
        return pixels + alpha * (accent - base)
    cells = background_cells(background).repeat(4, axis=0).repeat(4, axis=1)
    pixels[cells] = accent
    return pixels


def render_array(scene: Scene) -> np.ndarray:
    """Render a scene to pixels, uint8 (64, 64, 3)."""
    pixels = _draw_background(scene.background)
    for item in scene.objects:
        column, row = int(np.floor(item.x)), int(np.floor(item.y))
        alpha = coverage(item.shape, item.size, item.x - column, item.y - row)
        half = alpha.shape[0] // 2
        top, left = row - half, column - half
        y0, x0 = max(top, 0), max(left, 0)
        y1, x1 = min(top + alpha.shape[0], IMAGE_SIZE), min(left + alpha.shape[1], IMAGE_SIZE)
        if y0 >= y1 or x0 >= x1:
            continue
        visible = alpha[y0 - top : y1 - top, x0 - left : x1 - left, None]
        window = pixels[y0:y1, x0:x1]
        window += visible * (np.asarray(OBJECT_RGB[item.colour], dtype=np.float32) - window)
    return (pixels + 0.5).astype(np.uint8)


def render(scene: Scene) -> Image.Image:
    """Render a scene as a 64x64 RGB picture."""
    return Image.fromarray(render_array(scene))
