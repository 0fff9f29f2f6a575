"""The six-task score of the embedded model: pictures drawn from prompts, read back by the pixel checker."""

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
    """How many pictures of each family were right, and what they cost.

    Attributes:
        right, drawn: by family.
        nfe: mean passes of a picture, each counted as if it were drawn alone.
        verdicts: one a task, in order.
        codes: `int64 (n, rows, columns)`, the pictures.
        acceptance: by direction and round, the mean share of drafts kept.
    """

    right: dict[str, int]
    drawn: dict[str, int]
    nfe: float
    verdicts: tuple[bool, ...]
    codes: torch.Tensor
    acceptance: dict[str, float]

    @property
    def by_family(self) -> dict[str, float]:
        return {family: self.right[family] / self.drawn[family] for family in FAMILIES if self.drawn.get(family)}

    @property
    def six_task(self) -> float:
        """Mean of the families' shares of right pictures, as GenEval's overall score."""
        return sum(self.by_family.values()) / len(self.by_family)

    @property
    def standard_error(self) -> float:
        """Of `six_task`, from the binomial variance within each family."""
        variances = [p * (1 - p) / self.drawn[family] for family, p in self.by_family.items()]
        return math.sqrt(sum(variances)) / len(variances)

    def to_dict(self) -> dict[str, Any]:
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
        seed: task k draws from a generator of seed `seed + k`, whatever the batch size.
        label: shown beside the progress bar.
        call: further arguments of the pipeline's call, like `guidance_scale`.
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
