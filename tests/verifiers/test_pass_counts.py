"""The pass counts that the paper publishes, from the real loop with the real grids and forced tokens.

Source: arXiv 2606.20543, tables 1, 2, 5, 6 and 10. Speedups there are tokens over passes.
"""

import pytest

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier
from ssd_pipelines.testing import tiny_pipeline


@pytest.fixture(scope="module")
def pipelines():
    small = {"hidden_size": 16, "num_layers": 1, "image_vocab_size": 32}
    return {
        "janus": tiny_pipeline(side=24, num_vertical=5, **small),
        "lumina": tiny_pipeline(side=48, row_end=True, num_vertical=5, **small),
        "emu3": tiny_pipeline(side=90, row_end=True, num_vertical=5, **small),
    }


def passes(pipe, verifier) -> int:
    pipe.verifier = verifier
    output = pipe("a red circle", guidance_scale=1.0, output_type="latent")
    assert (output.codes >= 0).all(), "the grid is complete"
    return output.stats.nfe


LUMINA = {"rounds": 5, "trailing_rounds": 4}


@pytest.mark.parametrize(
    ("backbone", "settings", "published"),
    [
        ("janus", {"rounds": 0}, 34),
        ("janus", {"rounds": 1}, 57),
        ("janus", {"rounds": 2}, 80),
        ("lumina", {**LUMINA, "block_size": 1}, 304),
        ("lumina", {**LUMINA, "block_size": 2}, 281),
        ("lumina", {**LUMINA, "block_size": 3}, 273),
        ("lumina", {**LUMINA, "block_size": 4}, 269),
        ("lumina", {**LUMINA, "block_size": 5}, 267),
        ("lumina", {**LUMINA, "block_size": 2, "trailing_rounds": 1}, 212),
        ("lumina", {**LUMINA, "block_size": 2, "trailing_rounds": 2}, 235),
        ("lumina", {**LUMINA, "block_size": 2, "trailing_rounds": 3}, 258),
        ("lumina", {"block_size": 2, "rounds": 9, "trailing_rounds": 0}, 285),
        ("emu3", {"rounds": 6}, 661),
        ("janus", {"horizontal_only": True}, 231),
        ("lumina", {"horizontal_only": True}, 1056),
        ("emu3", {"horizontal_only": True}, 3420),
    ],
)
def test_the_loop_makes_as_many_passes_as_the_paper_published(pipelines, backbone, settings, published):
    assert passes(pipelines[backbone], SpatialDraftVerifier.paper(**settings)) == published


@pytest.mark.parametrize(("backbone", "tokens"), [("janus", 576), ("lumina", 2352)])
def test_autoregressive_decoding_makes_one_pass_a_token(pipelines, backbone, tokens):
    assert passes(pipelines[backbone], AutoregressiveVerifier()) == tokens
