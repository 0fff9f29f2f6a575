import pytest

from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.training import draw_token_grids


@pytest.fixture(scope="module")
def prompts():
    return ["a red circle", "a photo of a blue square and a green circle", "a green triangle"] * 4


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(side=4)


@pytest.fixture(scope="module")
def data(pipe, prompts, tmp_path_factory):
    return draw_token_grids(pipe, prompts, tmp_path_factory.mktemp("data"), batch_size=5, seed=3)
