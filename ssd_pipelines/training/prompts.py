"""Read and clean lists of prompts for distillation, without the prompts that are used for evaluation."""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from ssd_pipelines.scenes import SceneOptions, evaluation_tasks, sample_scene


SCENES = "scenes"
"""Name of our own prompt grammar, which describes the scenes that the embedded model can draw."""
COLUMNS = ("prompt", "text", "caption")
"""Columns that are searched for prompts if none is given."""
_FLAG = re.compile(r"\s--\w+(\s+[^\s-]\S*)?")
_URL = re.compile(r"(?:https?://|www\.)\S+")
_NOT_WORDS = re.compile(r"[^\w]+")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# GenEval's prompts follow six templates over the names of COCO's classes, so a pattern recognises them.
_COCO = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag,
tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard,
tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse,
tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors,
teddy bear, hair drier, toothbrush""".replace("\n", " ").split(", ")
_COLOURS = "red|orange|yellow|green|blue|purple|pink|brown|black|white"
_OBJECT = rf"(?:an? )?(?:(?:{_COLOURS}) )?(?:{'|'.join(_COCO)})"
_GENEVAL = re.compile(
    rf"a photo of (?:{_OBJECT}(?: (?:and|above|below|left of|right of) {_OBJECT})?"
    rf"|(?:two|three|four) (?:people|knives|(?:{'|'.join(_COCO)})\w*))"
)


def clean_prompts(
    prompts: Iterable[str], without: Sequence[str] = (), unless: Callable[[str], bool] = lambda text: False
) -> list[str]:
    """Strip flags like `--ar 16:9`, URLs and extra spaces; drop empty lines, duplicates and excluded prompts.

    Args:
        prompts: the raw prompts.
        without: prompts to exclude, like those of an evaluation; only words are compared, not case or punctuation.
        unless: function that returns whether to exclude a prompt; it gets the words in lower case.

    Example:
        >>> clean_prompts(["a fox --ar 16:9", "A fox!", "https://x.org a hen"], without=["a hen"])
        ['a fox']
    """
    seen = {_key(text) for text in without}
    kept = []
    for text in prompts:
        text = " ".join(_FLAG.sub(" ", " " + _URL.sub(" ", text)).split())
        key = _key(text)
        if key and key not in seen and not unless(key):
            seen.add(key)
            kept.append(text)
    return kept


def is_geneval(words: str) -> bool:
    """Return whether a prompt, in lower case and without punctuation, has one of GenEval's six templates.

    Source: arXiv 2310.11513.

    Example:
        >>> is_geneval("a photo of a dog right of a teddy bear"), is_geneval("a photo of a dog asleep")
        (True, False)
    """
    return _GENEVAL.fullmatch(words) is not None


def read_prompts(
    source: str | os.PathLike[str],
    num: int | None = None,
    seed: int = 0,
    exclude: Sequence[str | os.PathLike[str]] = (),
) -> list[str]:
    """Read prompts from a file, a data set on the Hub, or our own grammar.

    Prompts are cleaned. Those of the embedded model's own evaluation and of GenEval are excluded.

    Args:
        source: a text file with one prompt per line; a `.jsonl` of strings or of objects with "prompt", "text" or
            "caption"; a Hub data set, "user/name" or "user/name:column", whose first split is streamed (needs the
            `datasets` library); or "scenes", the grammar of the embedded model, which never gives the combinations
            that it is evaluated with.
        num: maximum number of prompts; required for "scenes", which is endless.
        seed: seed for "scenes".
        exclude: more prompts to exclude: files like `source`, or folders of text files with one prompt each, the
            format of DPG-Bench.

    Raises:
        ValueError: if the file or data set does not exist or has no prompts, or the `datasets` library is missing.
    """
    if num is not None and num < 1:
        raise ValueError(f"At least one prompt is needed, got num={num}.")
    if str(source) == SCENES:
        if num is None:
            raise ValueError('The prompts of "scenes" are endless: say how many with `num` (`--num`).')
        random, options = Random(seed), SceneOptions(dense=0.25)
        return [sample_scene(random, options).prompt for _ in range(num)]
    held_out = [task.prompt for task in evaluation_tasks(600)]
    for place in exclude:
        held_out += _read(place)
    # Only the beginning of a large table is downloaded: a third more than needed, as cleaning drops some.
    lines = _read(source) if Path(source).exists() or num is None else islice(_stream(source), num + num // 3 + 100)
    prompts = clean_prompts(lines, without=held_out, unless=is_geneval)
    if not prompts:
        raise ValueError(f"{source} has no prompts.")
    return prompts[:num]


def _read(source: str | os.PathLike[str]) -> list[str]:
    """Read all raw lines of a file, a folder of text files, or a Hub data set."""
    path = Path(source)
    if path.is_dir():
        return [" ".join(file.read_text("utf-8").split()) for file in sorted(path.glob("*.txt"))]
    if not path.is_file():
        return list(_stream(source))
    lines = path.read_text("utf-8").splitlines()
    if path.suffix != ".jsonl":
        return lines
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not valid JSON: {error}.") from error
        texts.append(row if isinstance(row, str) else _text_of(row, None, f"{path}, line {number},"))
    return texts


def _stream(source: str | os.PathLike[str]) -> Iterable[str]:
    """Stream the prompts of a Hub data set."""
    name, _, column = str(source).partition(":")
    if not _HUB_ID.fullmatch(name) or Path(name).suffix in (".txt", ".jsonl"):
        raise ValueError(
            f'{source} is not a file of prompts: give a text file, a .jsonl, "user/name:column" of a Hub data set, '
            'or "scenes".'
        )
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"Reading the data set {name} needs the `datasets` library: pip install 'ssd-pipelines[train]'."
        ) from error
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, OSError) as error:
        raise ValueError(
            f"{name} is not a local file, and no data set on the Hub that can be read with this token and connection: "
            f"{str(error).splitlines()[0]}"
        ) from error
    for row in next(iter(splits.values())):
        yield _text_of(row, column or None, name)


def _text_of(row: Any, column: str | None, where: str) -> str:
    names = COLUMNS if column is None else (column,)
    if isinstance(row, dict):
        for name in names:
            if isinstance(row.get(name), str):
                return row[name]
    known = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    raise ValueError(f"{where} has no text in {' or '.join(names)}; it has {known}.")


def _key(text: str) -> str:
    """Return the words of a prompt in lower case, for comparison."""
    return " ".join(_NOT_WORDS.sub(" ", text.lower()).split())
