import pytest

from ssd_pipelines import SpatialSpeculativePipeline
from ssd_pipelines.race import Race, race_decoders, record_race
from ssd_pipelines.scenes import CHECKPOINT


@pytest.fixture(scope="session")
def pipe() -> SpatialSpeculativePipeline:
    pipe = SpatialSpeculativePipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def race(pipe) -> Race:
    """All decoders of the page, with few pictures."""
    return record_race(pipe, race_decoders(pipe), "a ring above a cross", 0, max_pictures=4, machine="a test machine")
