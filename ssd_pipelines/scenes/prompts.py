"""Prompts and the tasks they stand for: GenEval's six task families with six shapes and six colours."""

import hashlib
import re
from dataclasses import dataclass
from itertools import permutations
from random import Random


SHAPES = ("circle", "square", "triangle", "diamond", "ring", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple")
RELATIONS = ("left of", "right of", "above", "below")
COUNTS = {"two": 2, "three": 3, "four": 4}
FAMILIES = ("single_object", "two_object", "counting", "colors", "position", "color_attribution")

PLURALS = {shape: "crosses" if shape == "cross" else f"{shape}s" for shape in SHAPES}
_SINGULARS = {plural: shape for shape, plural in PLURALS.items()}
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

HELD_OUT_SHARE = 0.2
"""Share of the combinations of `position` and `color_attribution` that training never sees."""


@dataclass(frozen=True)
class ObjectRequirement:
    """`count` objects of this shape and colour; of any colour if `colour` is None."""

    shape: str
    colour: str | None = None
    count: int = 1


@dataclass(frozen=True)
class SceneTask:
    """A prompt and the objects that a correct picture contains; it may contain nothing else.

    `relation` is the position of the first required object relative to the second.
    """

    family: str
    prompt: str
    objects: tuple[ObjectRequirement, ...]
    relation: str | None = None


def with_article(words: str) -> str:
    """Prefix the indefinite article: "orange ring" -> "an orange ring"."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def single_object_task(shape: str) -> SceneTask:
    """One object of any colour."""
    return SceneTask("single_object", f"a photo of {with_article(shape)}", (ObjectRequirement(shape),))


def two_object_task(first: str, second: str) -> SceneTask:
    """Two objects of these shapes, of any colour."""
    prompt = f"a photo of {with_article(first)} and {with_article(second)}"
    return SceneTask("two_object", prompt, (ObjectRequirement(first), ObjectRequirement(second)))


def counting_task(shape: str, word: str) -> SceneTask:
    """Several objects of one shape; `word` is one of `COUNTS`."""
    requirement = ObjectRequirement(shape, count=COUNTS[word])
    return SceneTask("counting", f"a photo of {word} {PLURALS[shape]}", (requirement,))


def colors_task(shape: str, colour: str) -> SceneTask:
    """One object of this shape and colour."""
    return SceneTask("colors", f"a photo of {with_article(f'{colour} {shape}')}", (ObjectRequirement(shape, colour),))


def position_task(first: str, relation: str, second: str) -> SceneTask:
    """Two objects of any colour in a relation; `relation` is one of `RELATIONS`."""
    prompt = f"a photo of {with_article(first)} {relation} {with_article(second)}"
    return SceneTask("position", prompt, (ObjectRequirement(first), ObjectRequirement(second)), relation)


def color_attribution_task(first: tuple[str, str], second: tuple[str, str]) -> SceneTask:
    """Two objects, each given as (shape, colour)."""
    words = [with_article(f"{colour} {shape}") for shape, colour in (first, second)]
    objects = (ObjectRequirement(*first), ObjectRequirement(*second))
    return SceneTask("color_attribution", f"a photo of {words[0]} and {words[1]}", objects)


def all_tasks(family: str) -> list[SceneTask]:
    """All tasks of a family, in a fixed order. Two objects differ in shape, and in colour if the task names colours.

    Raises:
        ValueError: if `family` is not one of `FAMILIES`.
    """
    if family == "single_object":
        return [single_object_task(shape) for shape in SHAPES]
    if family == "two_object":
        return [two_object_task(*pair) for pair in permutations(SHAPES, 2)]
    if family == "counting":
        return [counting_task(shape, word) for shape in SHAPES for word in COUNTS]
    if family == "colors":
        return [colors_task(shape, colour) for shape in SHAPES for colour in COLOURS]
    if family == "position":
        return [position_task(a, relation, b) for a, b in permutations(SHAPES, 2) for relation in RELATIONS]
    if family == "color_attribution":
        return [
            color_attribution_task((a, colour_a), (b, colour_b))
            for a, b in permutations(SHAPES, 2)
            for colour_a, colour_b in permutations(COLOURS, 2)
        ]
    raise ValueError(f"Unknown family {family!r}; known: {', '.join(FAMILIES)}.")


def is_held_out(task: SceneTask) -> bool:
    """Whether this combination is excluded from training, decided by a hash that is the same on every machine.

    Prompts with the same meaning are held out together, e.g. "a ring left of a cross" and "a cross right of a ring".
    """
    first, *rest = task.objects
    if task.family == "position":
        second, relation = rest[0], task.relation or ""
        forms = [f"{first.shape} {relation} {second.shape}", f"{second.shape} {_OPPOSITE[relation]} {first.shape}"]
    elif task.family == "color_attribution":
        forms = sorted(f"{item.colour} {item.shape}" for item in task.objects)
        forms = [" and ".join(forms)]
    else:
        return False
    digest = hashlib.sha256(min(forms).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def evaluation_tasks(num: int, seed: int = 0) -> list[SceneTask]:
    """Tasks to evaluate a model with, balanced over the six families and reproducible by `seed`.

    `position` and `color_attribution` contain only combinations that training never saw. The other families are too
    small to hold anything out: `single_object` has 6 prompts, `two_object` 15 pairs, `counting` 18 and `colors` 36
    prompts, and all of them occur in training. They show whether the model generates what it has learned, not whether
    it generalises.

    Args:
        num: number of tasks. The families take turns, starting with `single_object`.
        seed: selects the tasks. A family's prompts repeat only after all of them are used.

    Raises:
        ValueError: if `num` is negative.
    """
    if num < 0:
        raise ValueError(f"num={num} is negative: ask for zero or more tasks.")
    decks: list[list[SceneTask]] = []
    for index, family in enumerate(FAMILIES):
        tasks = all_tasks(family)
        deck = [task for task in tasks if is_held_out(task)] or tasks
        random = Random(f"{seed} {family}")
        order: list[SceneTask] = []
        while len(order) * len(FAMILIES) + index < num:
            order += random.sample(deck, len(deck))
        decks.append(order)
    return [decks[k % len(FAMILIES)][k // len(FAMILIES)] for k in range(num)]


_NOUN = re.compile(rf"(?:an? )?(?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)})")
_COUNT = re.compile(rf"({'|'.join(COUNTS)}) ({'|'.join(PLURALS.values())})")


def parse_prompt(text: str) -> SceneTask:
    """Parse a prompt of one of the six families; "a photo of" and articles are optional, case does not matter.

    Raises:
        ValueError: if it is not such a prompt; the message lists all that are supported.
    """
    words = " ".join(text.lower().strip().strip(".").split())
    words = words.removeprefix("a photo of ")
    if counted := _COUNT.fullmatch(words):
        return counting_task(_SINGULARS[counted[2]], counted[1])
    for joint in ("and", *RELATIONS):
        first, found, second = words.partition(f" {joint} ")
        a, b = _NOUN.fullmatch(first), _NOUN.fullmatch(second)
        if not (found and a and b):
            continue
        if a[2] == b[2]:
            break
        if joint != "and" and not a[1] and not b[1]:
            return position_task(a[2], joint, b[2])
        if joint == "and" and not a[1] and not b[1]:
            return two_object_task(a[2], b[2])
        if joint == "and" and a[1] and b[1] and a[1] != b[1]:
            return color_attribution_task((a[2], a[1]), (b[2], b[1]))
    if alone := _NOUN.fullmatch(words):
        return colors_task(alone[2], alone[1]) if alone[1] else single_object_task(alone[2])
    raise ValueError(
        f"The prompt {text!r} is not in one of the six families; ask for one object ('a ring', 'a red ring'), two of "
        "different shape and, if coloured, different colour ('a ring and a cross', 'a red ring and a blue cross'), a "
        f"relation ('a ring left of a cross'; also {', '.join(RELATIONS[1:])}) or a number ({', '.join(COUNTS)}: "
        f"'three squares'); shapes are {', '.join(SHAPES)}; colours are {', '.join(COLOURS)}."
    )
