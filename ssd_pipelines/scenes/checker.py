"""Checker that decides from the pixels alone whether a picture shows what its task asks for.

Objects are the saturated regions. Their colour is the nearest hue, their shape the best matching of six templates. A
region that is no clean object (too small or large, stretched, of mixed colour, or without a well-matching template)
makes the picture incorrect, even if everything else in it is correct.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from PIL import Image
from scipy import ndimage

from ssd_pipelines.scenes.prompts import SHAPES, SceneTask
from ssd_pipelines.scenes.renderer import IMAGE_SIZE, OBJECT_RGB, coverage
from ssd_pipelines.scenes.sampler import relation_holds


SPECK_PIXELS = 10
"""Regions smaller than this are decoding noise, not objects."""
MIN_SIZE, MAX_SIZE = 12, 32
MAX_ASPECT = 1.25
MIN_OVERLAP = 0.80
"""Minimum overlap (intersection over union) of a region with its shape's template."""
MIN_MARGIN = 0.03
"""Minimum difference in overlap between the best and the second-best template."""
MIN_PURITY = 0.85
"""Minimum share of a region's pixels that have the hue of its colour."""
_CHROMA = 60.0

_PALETTE = np.asarray([OBJECT_RGB[name] for name in OBJECT_RGB], dtype=np.float32)
_NAMES = tuple(OBJECT_RGB)
_EIGHT = np.ones((3, 3), dtype=bool)


@dataclass(frozen=True)
class FoundObject:
    """A region of the picture: best shape and colour, centre and size in pixels, quality of fit, and flaw if any."""

    shape: str
    colour: str
    x: float
    y: float
    size: float
    overlap: float
    purity: float
    flaw: str = ""


@dataclass(frozen=True)
class SceneVerdict:
    """Whether the picture fulfils the task, the reason if not (one sentence, else empty), and the objects found."""

    correct: bool
    reason: str
    objects: tuple[FoundObject, ...] = field(default=())


def _hue(rgb: np.ndarray) -> np.ndarray:
    """Hue in degrees, (..., 3) -> (...)."""
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    return np.degrees(np.arctan2(np.sqrt(3.0) * (green - blue), 2 * red - green - blue)) % 360


_PALETTE_HUES = _hue(_PALETTE)
_PALETTE_CHROMA = _PALETTE.max(-1) - _PALETTE.min(-1)


def _hue_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs((a - b + 180) % 360 - 180)


@lru_cache(maxsize=2048)
def _templates(side: int, size: float, fraction_x: float, fraction_y: float) -> np.ndarray:
    """Share of each pixel that each shape covers, (6, side, side); the centre is pixel side // 2 plus the fractions."""
    templates = np.zeros((len(SHAPES), side, side), dtype=np.float32)
    for template, shape in zip(templates, SHAPES, strict=True):
        alpha = coverage(shape, size, fraction_x, fraction_y)
        start = side // 2 - alpha.shape[0] // 2
        template[start : start + alpha.shape[0], start : start + alpha.shape[0]] = alpha
    return templates


def _overlaps(cover: np.ndarray, x: float, y: float, size: float) -> np.ndarray:
    """Best overlap of a region with each shape near a position and size, (6,).

    The overlap is the sum of the smaller coverage of each pixel divided by the sum of the larger one: intersection over
    union for anti-aliased masks. Partly covered edge pixels distinguish a small diamond from a circle, which whole
    pixels hardly do.
    """
    best = np.zeros(len(SHAPES), dtype=np.float32)
    half = int(np.ceil(size / 2)) + 4
    side = 2 * half + 1
    padded = np.pad(cover, half)
    for dy in (-0.5, 0.0, 0.5):
        for dx in (-0.5, 0.0, 0.5):
            column, row = int(np.floor(x + dx)), int(np.floor(y + dy))
            window = padded[row : row + side, column : column + side]
            area = window.sum()
            for tried in (size - 1, size - 0.5, size, size + 0.5, size + 1):
                templates = _templates(side, tried, x + dx - column, y + dy - row)
                both = np.minimum(templates, window).sum((1, 2))
                np.maximum(best, both / (area + templates.sum((1, 2)) - both), out=best)
    return best


def _examine(pixels: np.ndarray, chroma: np.ndarray, region: np.ndarray) -> FoundObject | None:
    """Measure one region; None for a speck."""
    weight = np.where(region, chroma, 0.0)
    strong = region & (chroma >= np.quantile(chroma[region], 0.6))
    hue = _hue(np.median(pixels[strong], axis=0))
    distance = _hue_distance(_PALETTE_HUES, hue)
    index = int(distance.argmin())
    # An anti-aliased edge is where the saturation is half of the colour's own.
    mask = weight > 0.5 * _PALETTE_CHROMA[index]
    area = int(mask.sum())
    if area < SPECK_PIXELS:
        return None
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = int(bottom - top), int(right - left)
    cover = np.where(region, np.clip(chroma / _PALETTE_CHROMA[index], 0.0, 1.0), 0.0).astype(np.float32)
    overlaps = _overlaps(cover, (left + right) / 2, (top + bottom) / 2, (height + width) / 2)
    order = np.argsort(overlaps)
    shape, overlap = SHAPES[order[-1]], float(overlaps[order[-1]])
    solid = pixels[mask]
    purity = float((_hue_distance(_hue(solid), _PALETTE_HUES[index]) <= 15).mean())
    flaw = ""
    if not MIN_SIZE <= (height + width) / 2 <= MAX_SIZE:
        flaw = f"is {width}x{height} pixels, but {MIN_SIZE} to {MAX_SIZE} are allowed"
    elif max(height, width) > MAX_ASPECT * min(height, width):
        flaw = f"is stretched to {width}x{height} pixels"
    elif overlap < MIN_OVERLAP:
        flaw = f"fits no shape (overlap {overlap:.2f} with a {shape})"
    elif overlap - overlaps[order[-2]] < MIN_MARGIN:
        flaw = f"fits a {shape} only slightly better than a {SHAPES[order[-2]]}"
    elif purity < MIN_PURITY or distance[index] > 12:
        flaw = f"has no clear colour ({purity:.0%} {_NAMES[index]})"
    return FoundObject(
        shape, _NAMES[index], (left + right) / 2, (top + bottom) / 2, (height + width) / 2, overlap, purity, flaw
    )


def find_objects(image: Image.Image | np.ndarray) -> tuple[FoundObject, ...]:
    """Find all objects of a picture from top to bottom, including flawed ones.

    Args:
        image: PIL picture or (64, 64, 3) uint8 array.

    Raises:
        ValueError: for another size or dtype.
    """
    if isinstance(image, Image.Image):
        image = np.asarray(image.convert("RGB"))
    if image.shape != (IMAGE_SIZE, IMAGE_SIZE, 3) or image.dtype != np.uint8:
        raise ValueError(
            f"Expected a {IMAGE_SIZE}x{IMAGE_SIZE} RGB picture of uint8, got an array of {image.shape} {image.dtype}."
        )
    pixels = image.astype(np.float32)
    chroma = pixels.max(-1) - pixels.min(-1)
    labels, number = ndimage.label(chroma > _CHROMA, structure=_EIGHT)
    found = (_examine(pixels, chroma, labels == k) for k in range(1, number + 1) if (labels == k).sum() >= SPECK_PIXELS)
    return tuple(sorted((item for item in found if item), key=lambda item: (item.y, item.x)))


def check_scene(image: Image.Image | np.ndarray, task: SceneTask) -> SceneVerdict:
    """Check a picture: it must have exactly the required objects, without flaws and in the required relation.

    Args:
        image: PIL picture or (64, 64, 3) uint8 array.
        task: the requirements.

    Raises:
        ValueError: for another size or dtype.
    """
    found = find_objects(image)

    def wrong(reason: str) -> SceneVerdict:
        return SceneVerdict(False, reason, found)

    for item in found:
        if item.flaw:
            return wrong(f"A {item.colour} region at ({item.x:.0f}, {item.y:.0f}) {item.flaw}.")
    required = [(item.shape, item.colour) for item in task.objects for _ in range(item.count)]
    if len(found) != len(required):
        return wrong(f"{len(found)} objects instead of {len(required)}.")
    # The required shapes are all different or all the same, so matching by shape is unambiguous.
    chosen: list[FoundObject] = []
    left = list(found)
    for shape, colour in required:
        match = next((item for item in left if item.shape == shape and colour in (None, item.colour)), None)
        if match is None:
            seen = ", ".join(f"{item.colour} {item.shape}" for item in found)
            return wrong(f"No {f'{colour} ' if colour else ''}{shape} among: {seen}.")
        left.remove(match)
        chosen.append(match)
    if task.relation:
        first, second = chosen
        if not relation_holds(task.relation, first.x - second.x, first.y - second.y):
            return wrong(
                f"The {first.shape} at ({first.x:.0f}, {first.y:.0f}) is not {task.relation} "
                f"the {second.shape} at ({second.x:.0f}, {second.y:.0f})."
            )
    return SceneVerdict(True, "", found)
