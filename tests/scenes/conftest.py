"""Shared pictures."""

from random import Random

import pytest

from ssd_pipelines.scenes import SceneOptions, TrainingScene, sample_scene


@pytest.fixture(scope="session")
def scenes() -> list[TrainingScene]:
    random = Random(20)
    return [sample_scene(random, SceneOptions()) for _ in range(600)]
