"""Sampling of training scenes with prompts: short ones as in GenEval, and dense ones that describe everything."""

from dataclasses import dataclass
from random import Random

from ssd_pipelines.scenes.prompts import (
    COLOURS,
    COUNTS,
    FAMILIES,
    PLURALS,
    RELATIONS,
    SHAPES,
    SceneTask,
    color_attribution_task,
    colors_task,
    counting_task,
    is_held_out,
    position_task,
    single_object_task,
    two_object_task,
    with_article,
)
from ssd_pipelines.scenes.renderer import IMAGE_SIZE, Background, Scene, SceneObject


SIZE_NAMES = {16: "small", 20: "medium", 24: "large", 28: "huge"}
PATTERNS = ("plain", "stripes", "planks", "checks", "dots", "tiles")
# Only adjacent greys, so that a pattern has less contrast than the objects on it.
_ACCENTS = {
    "white": ("silver", "beige"),
    "beige": ("white", "silver"),
    "silver": ("white", "grey"),
    "grey": ("silver", "black"),
    "black": ("grey",),
}
MARGIN = 4
"""Minimum distance between an object and the picture's border, in pixels."""
GAP = 4
"""Minimum distance between two objects, in pixels."""
ANCHORS = (4, 20, 36)
"""Allowed left and top coordinates of an object's box, in pixels.

All are multiples of 4, the side of a token, so a shape needs few different codes. There are few of them because a
picture is generated token by token, and an object may begin at each token. From a hundred positions of one percent each
a small model learns little, and the errors add up; it can learn to choose among nine.
"""


@dataclass(frozen=True)
class SceneOptions:
    """Variety of the sampled scenes; a curriculum widens these settings one by one.

    Args:
        families: weight of each of the six families.
        spread: probability that a coordinate of a single object is any of `ANCHORS`, instead of the middle one.
        sizes: allowed object sizes in pixels; two objects use those up to 24, three and four those up to 20.
        patterns: weight of each of `PATTERNS`.
        dense: share of prompts that describe the whole picture.
    """

    families: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    spread: float = 1.0
    sizes: tuple[int, ...] = (16, 20, 24, 28)
    patterns: tuple[float, ...] = (6.0, 1.5, 1.0, 1.0, 1.0, 1.0)
    dense: float = 0.5


@dataclass(frozen=True)
class TrainingScene:
    """A scene, its training prompt, and the task that a picture of it fulfils."""

    scene: Scene
    prompt: str
    task: SceneTask


def _sample_background(random: Random, options: SceneOptions) -> Background:
    pattern = random.choices(PATTERNS, options.patterns)[0]
    base = random.choice(tuple(_ACCENTS))
    accent = random.choice(_ACCENTS[base])
    horizontal = random.random() < 0.5
    cell = random.choice((3, 4)) if pattern == "dots" else random.choice((1, 2))
    shift = (random.randrange(4), random.randrange(4))
    cells: tuple[bool, ...] = ()
    if pattern == "planks":
        line: list[bool] = []
        while len(line) < 16:
            line += [not line[-1] if line else random.random() < 0.5] * random.randint(1, 3)
        cells = tuple(line[:16])
    elif pattern == "tiles":
        cells = tuple(random.random() < 0.3 for _ in range(81))
    return Background(pattern, base, accent, horizontal, cell, shift, cells)


def _place(random: Random, sizes: list[int], spread: float) -> list[tuple[float, float]] | None:
    """Centres for boxes of these sizes, with gaps between them; None if a box finds no room."""
    placed: list[tuple[float, float]] = []
    for index, size in enumerate(sizes):
        fitting = [anchor for anchor in ANCHORS if anchor + size <= IMAGE_SIZE - MARGIN]
        for _ in range(30):
            x, y = ((random.choice(fitting) if random.random() < spread else ANCHORS[1]) + size / 2 for _ in range(2))
            if all(
                max(abs(x - a), abs(y - b)) >= (size + other) / 2 + GAP
                for (a, b), other in zip(placed, sizes[:index], strict=True)
            ):
                placed.append((x, y))
                break
        else:
            return None
    return placed


def relation_holds(relation: str, dx: float, dy: float, margin: float = 0.0) -> bool:
    """Whether an object is clearly in a relation to another one.

    The distance in the other direction must be clearly smaller: an object that is diagonally up and left of another is
    neither clearly above nor clearly left of it.

    Args:
        relation: one of `RELATIONS`.
        dx, dy: how far the object's centre is to the right of and below the other's, in pixels.
        margin: extra pixels to require.
    """
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
    across = abs(dy) if relation in ("left of", "right of") else abs(dx)
    return along >= 12 + margin and along >= across + 4 + margin


def _related(relation: str, centres: list[tuple[float, float]], sizes: list[int]) -> bool:
    """Whether the relation clearly holds; left and right also need equal tops, so that the left one comes first."""
    (x0, y0), (x1, y1) = centres
    if relation in ("left of", "right of") and y0 - sizes[0] / 2 != y1 - sizes[1] / 2:
        return False
    return relation_holds(relation, x0 - x1, y0 - y1, margin=4)


def _in_drawing_order(
    centres: list[tuple[float, float]], sizes: list[int]
) -> tuple[list[tuple[float, float]], list[int]]:
    """Sort boxes from top to bottom, and from left to right if their tops are equal."""
    placed = sorted(zip(centres, sizes, strict=True), key=lambda item: (item[0][1] - item[1] / 2, item[0][0]))
    return [centre for centre, _ in placed], [size for _, size in placed]


def _where(x: float, y: float) -> str:
    rows = "top " if y < 26 else "bottom " if y > 38 else ""
    columns = "left" if x < 26 else "right" if x > 38 else ""
    return (rows + columns).strip() or "center"


def _describe(item: SceneObject, place: bool) -> str:
    words = with_article(f"{SIZE_NAMES[int(item.size)]} {item.colour} {item.shape}")
    return f"{words} at the {_where(item.x, item.y)}" if place else words


def _dense_prompt(task: SceneTask, scene: Scene) -> str:
    objects, background = scene.objects, scene.background
    if task.family == "counting":
        word = next(word for word, count in COUNTS.items() if count == len(objects))
        first = objects[0]
        what = f"{word} {SIZE_NAMES[int(first.size)]} {first.colour} {PLURALS[first.shape]}"
    elif task.relation:
        what = f" {task.relation} ".join(_describe(item, place=False) for item in objects)
    else:
        what = " and ".join(_describe(item, place=True) for item in objects)
    ground = f"on {with_article(background.base)} background"
    if background.pattern != "plain":
        way = ""
        if background.pattern in ("stripes", "planks"):
            way = "horizontal " if background.horizontal else "vertical "
        ground += f" with {way}{background.accent} {background.pattern}"
    return f"a photo of {what} {ground}"


def _sample_task(random: Random, family: str) -> SceneTask:
    a, b = random.sample(SHAPES, 2)
    colour_a, colour_b = random.sample(COLOURS, 2)
    if family == "single_object":
        return single_object_task(a)
    if family == "two_object":
        return two_object_task(a, b)
    if family == "counting":
        return counting_task(a, random.choice(tuple(COUNTS)))
    if family == "colors":
        return colors_task(a, colour_a)
    if family == "position":
        return position_task(a, random.choice(RELATIONS), b)
    return color_attribution_task((a, colour_a), (b, colour_b))


def _object_sizes(random: Random, number: int, family: str, allowed: tuple[int, ...]) -> list[int]:
    if family == "counting":
        fitting = [size for size in allowed if size <= (24 if number == 2 else 20)] or [20]
        return [random.choice(fitting)] * number
    if number == 2:
        allowed = tuple(size for size in allowed if size <= 24) or (20,)
    return [random.choice(allowed) for _ in range(number)]


def sample_scene(random: Random, options: SceneOptions | None = None) -> TrainingScene:
    """Sample one training scene. Held-out combinations (`is_held_out`) never occur in short or dense prompts."""
    options = options or SceneOptions()
    while True:
        family = random.choices(FAMILIES, options.families)[0]
        task = _sample_task(random, family)
        if is_held_out(task):
            continue
        shapes = [item.shape for item in task.objects for _ in range(item.count)]
        if family == "counting":
            colours = [random.choice(COLOURS)] * len(shapes)
        else:
            colours = [item.colour or random.choice(COLOURS) for item in task.objects]
        if len(task.objects) == 2 and colours[0] != colours[1]:
            # A dense prompt names the colours of both, so this is checked for pairs of all families.
            first, second = zip(shapes, colours, strict=True)
            if is_held_out(color_attribution_task(first, second)):
                continue
        sizes = _object_sizes(random, len(shapes), family, options.sizes)
        # Two or more objects don't fit near the centre, so they use all anchors.
        spread = options.spread if len(sizes) == 1 else 1.0
        centres = _place(random, sizes, spread)
        while centres is None or (task.relation and not _related(task.relation, centres, sizes)):
            centres = _place(random, sizes, spread)
        if task.relation is None:
            # The object that is named first comes first in raster order. If it could be either, the first token of an
            # object would choose between two *pairs* of shape and colour, which a small model mixes up.
            centres, sizes = _in_drawing_order(centres, sizes)
        objects = tuple(
            SceneObject(shape, colour, x, y, size)
            for shape, colour, (x, y), size in zip(shapes, colours, centres, sizes, strict=True)
        )
        scene = Scene(_sample_background(random, options), objects)
        prompt = _dense_prompt(task, scene) if random.random() < options.dense else task.prompt
        return TrainingScene(scene, prompt, task)
