"""Fixed image codes: the code of a token depends only on its own 4x4 pixels.

A VQ autoencoder that learns its codes freely encodes the same white patch as one of a dozen codes, depending on the
rest of the picture. Measured on a simple picture, 150 of its 200 nats were such synonyms, which no prompt explains and
on which a small backbone spends its training. Here the codes are defined in advance from what the renderer knows about
a patch, and the image tokenizer is trained to encode and decode exactly these:

    0 .. 4      a flat patch of one of the five background colours
    5 .. 24     a quarter of a dot: 5 accent colours x 4 quarters
    25 .. 492   a patch with an object in it: 6 colours x 78 outlines

Objects lie on the token grid, so only 158 different outlines occur; they are clustered to 78. The decoder infers what a
code doesn't say, the exact outline and the background behind an edge, from the neighbouring codes.
"""

from functools import lru_cache

import numpy as np
from common import GRID_SIDE, NUM_CODES, PATCH_SIZE
from scipy.cluster.hierarchy import fcluster, linkage

from ssd_pipelines.scenes import COLOURS, SHAPES, Background, Scene
from ssd_pipelines.scenes.renderer import BACKGROUND_RGB, OBJECT_RGB, background_cells, coverage
from ssd_pipelines.scenes.sampler import SIZE_NAMES


GROUNDS = tuple(BACKGROUND_RGB)
DOTS = len(GROUNDS)
OBJECTS = DOTS + 4 * len(GROUNDS)
OUTLINES = 78
"""The largest number of clusters that fits into 512 codes; ties in the cluster tree rule out 79 to 81."""
_LEAST = 0.8
"""A patch with fewer covered pixels than this counts as background."""


def _object_patches(shape: str, size: int) -> np.ndarray:
    """Coverage of the pixels of a shape's box, padded by one patch on each side, `float32 (n + 2, n + 2, 16)`."""
    alpha = coverage(shape, float(size), 0.0, 0.0)
    half, side = alpha.shape[0] // 2, size + 2 * PATCH_SIZE
    canvas = np.zeros((side + 2 * PATCH_SIZE,) * 2, dtype=np.float32)
    middle = canvas.shape[0] // 2
    canvas[middle - half : middle + half + 1, middle - half : middle + half + 1] = alpha
    canvas = canvas[PATCH_SIZE:-PATCH_SIZE, PATCH_SIZE:-PATCH_SIZE]
    number = side // PATCH_SIZE
    patches = canvas.reshape(number, PATCH_SIZE, number, PATCH_SIZE).transpose(0, 2, 1, 3)
    return patches.reshape(number, number, PATCH_SIZE**2)


@lru_cache(maxsize=1)
def outlines() -> np.ndarray:
    """Return the clustered outlines, `float32 (78, 16)` pixel coverages in [0, 1]."""
    seen = np.concatenate([_object_patches(shape, size).reshape(-1, 16) for shape in SHAPES for size in SIZE_NAMES])
    kinds = np.unique(seen[seen.sum(1) >= _LEAST].round(2), axis=0)
    labels = fcluster(linkage(kinds, "ward"), OUTLINES, criterion="maxclust")
    return np.stack([kinds[labels == label].mean(0) for label in range(1, OUTLINES + 1)]).astype(np.float32)


@lru_cache(maxsize=64)
def _object_outlines(shape: str, size: int) -> np.ndarray:
    """Outline index of each patch of a shape, `int64 (n + 2, n + 2)`, -1 for background."""
    patches = _object_patches(shape, size)
    nearest = np.square(patches[:, :, None] - outlines()).sum(-1).argmin(-1)
    return np.where(patches.sum(-1) >= _LEAST, nearest, -1)


def _ground_codes(background: Background) -> np.ndarray:
    base, accent = GROUNDS.index(background.base), GROUNDS.index(background.accent)
    codes = np.full((GRID_SIDE, GRID_SIDE), base)
    if background.pattern == "dots":
        # The centre of a dot is the corner of four patches: the patch above and to the left has quarter 3, and so on.
        sides = []
        for shift in background.shift:
            offset = np.arange(GRID_SIDE) + shift
            right = np.where((offset + 1) % background.cell == 0, 1, -1)
            sides.append(np.where(offset % background.cell == 0, 0, right))
        columns, rows = sides[0][None, :], sides[1][:, None]
        return np.where((columns >= 0) & (rows >= 0), DOTS + 4 * accent + columns + 2 * rows, codes)
    if background.pattern != "plain":
        codes[background_cells(background)] = accent
    return codes


def encode(scene: Scene) -> np.ndarray:
    """Return the codes of a scene, `int64 (16, 16)`; its objects must lie on the token grid."""
    codes = _ground_codes(scene.background).copy()
    for item in scene.objects:
        found = _object_outlines(item.shape, int(item.size))
        left, top = (int(value - item.size / 2) // PATCH_SIZE - 1 for value in (item.x, item.y))
        window = codes[top : top + len(found), left : left + len(found)]
        # Only the empty ring around an object can extend past the border of the picture; cut it off.
        part = found[: window.shape[0], : window.shape[1]]
        window[...] = np.where(part >= 0, OBJECTS + OUTLINES * COLOURS.index(item.colour) + part, window)
    return codes


def preview(codes: np.ndarray) -> np.ndarray:
    """Render codes without the trained decoder, by tiling their patches.

    Args:
        codes: integers `(16, 16)`.

    Returns:
        `uint8 (64, 64, 3)`.
    """
    grounds = np.asarray([BACKGROUND_RGB[name] for name in GROUNDS], dtype=np.float32)
    colours = np.asarray([OBJECT_RGB[name] for name in COLOURS], dtype=np.float32)
    flat = codes[codes < DOTS]
    behind = grounds[np.bincount(flat, minlength=1).argmax() if len(flat) else 0]
    pixels = np.empty((GRID_SIDE, GRID_SIDE, PATCH_SIZE**2, 3), dtype=np.float32)
    y, x = np.mgrid[0:PATCH_SIZE, 0:PATCH_SIZE] + 0.5
    for row, column in np.ndindex(codes.shape):
        code = int(codes[row, column])
        if code < DOTS:
            pixels[row, column] = grounds[code]
            continue
        if code < OBJECTS:
            accent, quarter = divmod(code - DOTS, 4)
            distance = np.hypot(x - PATCH_SIZE * (quarter % 2), y - PATCH_SIZE * (quarter // 2))
            alpha, colour = np.clip(3.5 - distance, 0, 1).reshape(-1), grounds[accent]
        else:
            index, outline = divmod(min(code, OBJECTS + OUTLINES * len(COLOURS) - 1) - OBJECTS, OUTLINES)
            alpha, colour = outlines()[outline], colours[index]
        pixels[row, column] = behind + alpha[:, None] * (colour - behind)
    square = pixels.reshape(GRID_SIDE, GRID_SIDE, PATCH_SIZE, PATCH_SIZE, 3).transpose(0, 2, 1, 3, 4)
    return (square.reshape(64, 64, 3) + 0.5).astype(np.uint8)


def code_vectors(dimensions: int = 8) -> np.ndarray:
    """Return a unit vector for each code, `float32 (512, dimensions)`.

    With 8 dimensions, four encode the outline or kind and four the colour. Codes that differ in only one of the two are
    close, so encoder, decoder and backbone learn shapes for all colours at once.
    """
    random = np.random.default_rng(0)
    half = dimensions // 2
    centred = outlines() - outlines().mean(0)
    shape_part = centred @ np.linalg.svd(centred, full_matrices=False)[2][:half].T
    shape_part = shape_part / shape_part.std(0) + 0.3 * random.normal(size=shape_part.shape)
    colour_part = _spread(len(COLOURS) + len(GROUNDS), half)
    kinds = 1.5 * _spread(5, half)
    vectors = random.normal(size=(NUM_CODES, dimensions))
    for ground in range(len(GROUNDS)):
        tone = 2.0 * colour_part[len(COLOURS) + ground]
        vectors[ground] = np.concatenate([kinds[0], tone])
        for quarter in range(4):
            vectors[DOTS + 4 * ground + quarter] = np.concatenate([kinds[1 + quarter], tone])
    for colour in range(len(COLOURS)):
        start = OBJECTS + OUTLINES * colour
        tones = np.broadcast_to(2.0 * colour_part[colour], (OUTLINES, half))
        vectors[start : start + OUTLINES] = np.concatenate([shape_part, tones], 1)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def _spread(number: int, dimensions: int) -> np.ndarray:
    """Unit vectors far from each other, `(number, dimensions)`: the best of 4,000 random draws."""
    random = np.random.default_rng(1)
    draws = random.normal(size=(4000, number, dimensions))
    draws /= np.linalg.norm(draws, axis=-1, keepdims=True)
    products = draws @ draws.transpose(0, 2, 1) - 2 * np.eye(number)
    return draws[products.max((1, 2)).argmin()]
