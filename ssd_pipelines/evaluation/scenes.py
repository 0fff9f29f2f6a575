"""Compute the six-task score of the embedded model: draw pictures from prompts, and check them by their pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.scenes import FAMILIES, SceneTask, check_scene
from ssd_pipelines.verifiers import Verifier


@dataclass(frozen=True)
class SceneScore:
    """Number of correct pictures by family of prompts, and the passes that they took.

    Attributes:
        right, drawn: number of correct pictures and of all pictures, by family.
        nfe: mean passes per picture, counted as at batch size 1.
        verdicts: whether each picture is correct, in the order of the tasks.
        codes: `int64 (n, rows, columns)`, the pictures.
        acceptance: mean share of accepted draft tokens, by direction and round.
    """

    right: dict[str, int]
    drawn: dict[str, int]
    nfe: float
    verdicts: tuple[bool, ...]
    codes: torch.Tensor
    acceptance: dict[str, float]

    @property
    def by_family(self) -> dict[str, float]:
        """Share of correct pictures in each family."""
        return {family: self.right[family] / self.drawn[family] for family in FAMILIES if self.drawn.get(family)}

    @property
    def six_task(self) -> float:
        """Mean over families of the share of correct pictures, like GenEval's overall score."""
        return sum(self.by_family.values()) / len(self.by_family)

    @property
    def standard_error(self) -> float:
        """Standard error of `six_task`, from the binomial variance within each family."""
        variances = [p * (1 - p) / self.drawn[family] for family, p in self.by_family.items()]
        return math.sqrt(sum(variances)) / len(variances)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores and the passes by name."""
        return {
            "six_task": self.six_task,
            "standard_error": self.standard_error,
            "by_family": self.by_family,
            "nfe": self.nfe,
        }


def score_scenes(
    pipe: SpatialSpeculativePipeline,
    verifier: Verifier,
    tasks: Sequence[SceneTask],
    seed: int = 0,
    batch_size: int = 50,
    label: str = "",
    **call: Any,
) -> SceneScore:
    """Draw a picture for every task with `verifier` and check it.

    Args:
        pipe: the pipeline.
        verifier: the verifier to draw with.
        tasks: the prompts, and what their pictures must show.
        seed: task k is drawn with a generator of seed `seed + k`, for any batch size.
        batch_size: pictures drawn together.
        label: text of the progress bar.
        call: other arguments of the pipeline's call, like `guidance_scale`.
    """
    before, pipe.verifier = pipe.verifier, verifier
    verdicts: list[bool] = []
    passes: list[int] = []
    codes: list[torch.Tensor] = []
    acceptance: dict[str, list[float]] = {}
    try:
        for start in tqdm(range(0, len(tasks), batch_size), desc=label, unit="batch", leave=False):
            batch = tasks[start : start + batch_size]
            generators = [torch.Generator().manual_seed(seed + start + k) for k in range(len(batch))]
            output = pipe([task.prompt for task in batch], generator=generators, **call)
            passes += output.stats.passes
            codes.append(output.codes.cpu())
            for key, rate in output.stats.acceptance.items():
                acceptance.setdefault(f"{key.direction}, round {key.round}", []).append(rate)
            verdicts += [check_scene(image, task).correct for image, task in zip(output.images, batch, strict=True)]
    finally:
        pipe.verifier = before
    drawn = {family: sum(task.family == family for task in tasks) for family in FAMILIES}
    right = {
        family: sum(ok for ok, task in zip(verdicts, tasks, strict=True) if task.family == family)
        for family in FAMILIES
    }
    return SceneScore(
        right=right,
        drawn=drawn,
        nfe=sum(passes) / max(len(passes), 1),
        verdicts=tuple(verdicts),
        codes=torch.cat(codes),
        acceptance={name: sum(rates) / len(rates) for name, rates in acceptance.items()},
    )
