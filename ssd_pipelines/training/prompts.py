"""Lists of prompts to distil from: read, cleaned, and kept apart from those that models are measured with."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from ssd_pipelines.scenes import SceneOptions, evaluation_tasks, sample_scene


SCENES = "scenes"
"""The name of our own prompt grammar: scenes that the embedded model knows."""
_FLAG = re.compile(r"\s--\w+(\s+[^\s-]\S*)?")
_URL = re.compile(r"(?:https?://|www\.)\S+")


def clean_prompts(prompts: Iterable[str], without: Sequence[str] = ()) -> list[str]:
    """Strip flags like `--ar 16:9` and addresses, collapse blanks, drop empty lines, repetitions and some prompts.

    Args:
        without: prompts to leave out, compared without regard to case: those of an evaluation.

    Example:
        >>> clean_prompts(["a fox --ar 16:9", "A fox", "https://x.org a hen"], without=["a hen"])
        ['a fox']
    """
    seen = {_key(text) for text in without}
    kept = []
    for text in prompts:
        text = " ".join(_FLAG.sub(" ", " " + _URL.sub(" ", text)).split())
        if text and _key(text) not in seen:
            seen.add(_key(text))
            kept.append(text)
    return kept


def read_prompts(source: str | os.PathLike[str], num: int | None = None, seed: int = 0) -> list[str]:
    """Prompts from a file, or from our own grammar.

    Args:
        source: a text file of one prompt a line; a `.jsonl` of strings or of objects with "prompt" or "text"; or
            "scenes", the embedded model's world, where combinations that it is measured with never occur.
        num: how many at most; needed for "scenes", which has no end.
        seed: of "scenes".

    Raises:
        ValueError: if there is no such file, or nothing in it.
    """
    if str(source) == SCENES:
        if num is None:
            raise ValueError('The prompts of "scenes" have no end: say how many.')
        random, options = Random(seed), SceneOptions(dense=0.25)
        return [sample_scene(random, options).prompt for _ in range(num)]
    path = Path(source)
    if not path.is_file():
        raise ValueError(f'{source} is no file of prompts: give a text file, a .jsonl, or "scenes".')
    lines = path.read_text("utf-8").splitlines()
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in lines if line.strip()]
        lines = [row if isinstance(row, str) else row.get("prompt") or row.get("text") or "" for row in rows]
    held_out = [task.prompt for task in evaluation_tasks(600)]
    prompts = clean_prompts(lines, without=held_out)
    if not prompts:
        raise ValueError(f"{source} has no prompts.")
    return prompts[:num]


def _key(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
