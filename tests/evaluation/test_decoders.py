import json
import math

import pytest
import torch

from ssd_pipelines.evaluation.decoders import (
    QUICK,
    Decoder,
    DecoderFigures,
    all_decoders,
    compare_decoders,
    log_likelihood,
    pareto_front,
    plot,
    write_csv,
)
from ssd_pipelines.evaluation.latency import measure_latency
from ssd_pipelines.scenes import evaluation_tasks
from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.verifiers import AutoregressiveVerifier, SpatialDraftVerifier


DECODERS = [
    Decoder("AR", "reference", AutoregressiveVerifier()),
    Decoder("lossless", "ours", SpatialDraftVerifier(lossless=True), lossless=True),
    Decoder("drafts", "ours", SpatialDraftVerifier(rounds=0, horizontal_rounds=0)),
]


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(side=16, image_vocab_size=16, hidden_size=16, num_layers=1)


@pytest.fixture(scope="module")
def measured(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    return folder, compare_decoders(pipe, DECODERS, evaluation_tasks(6), folder, timed=1)


def test_a_lossless_decoder_agrees_with_the_reference_in_everything_but_passes(measured):
    _, figures = measured
    ar, lossless, drafts = figures["AR"], figures["lossless"], figures["drafts"]
    assert ar.passes == 256 and ar.agreement == 1.0 and ar.psnr == math.inf
    assert lossless.passes < 256
    assert (lossless.agreement, lossless.psnr, lossless.log_likelihood) == (1.0, math.inf, ar.log_likelihood)
    assert drafts.passes < lossless.passes and drafts.agreement < 1 and drafts.psnr < 60
    assert drafts.log_likelihood < ar.log_likelihood, "random heads draw what the backbone wouldn't"
    assert ar.wall_ratio == pytest.approx(1.0, rel=0.5)


def test_a_rerun_goes_on_where_it_stopped_and_refuses_other_settings(pipe, measured):
    folder, figures = measured
    (folder / "drafts.json").unlink()
    before = (folder / "lossless.json").stat().st_mtime_ns
    again = compare_decoders(pipe, DECODERS, evaluation_tasks(6), folder, timed=1)
    assert (folder / "lossless.json").stat().st_mtime_ns == before
    assert again["drafts"].agreement == figures["drafts"].agreement
    with pytest.raises(ValueError, match="holds figures of another model or other settings"):
        compare_decoders(pipe, DECODERS, evaluation_tasks(6), folder, seed=1, timed=1)


def test_figures_of_another_model_or_other_heads_are_not_taken_for_this_one_s(tmp_path):
    tasks, size = evaluation_tasks(6), {"side": 16, "image_vocab_size": 16, "hidden_size": 16, "num_layers": 1}
    pipe = tiny_pipeline(**size)
    compare_decoders(pipe, DECODERS, tasks, tmp_path, timed=0)

    @torch.no_grad()
    def halved(model):
        for parameter in model.parameters():
            parameter.mul_(0.5)

    def written():
        return {path.stem: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}

    before = written()
    halved(pipe.heads)
    compare_decoders(pipe, DECODERS, tasks, tmp_path, timed=0)
    after = written()
    assert after["ar"] == before["ar"]
    assert after["lossless"] > before["lossless"] and after["drafts"] > before["drafts"]
    halved(pipe.backbone)
    with pytest.raises(ValueError, match="another model"):
        compare_decoders(pipe, DECODERS, tasks, tmp_path, timed=0)


def test_the_pipeline_is_left_as_it_was(pipe, measured):
    assert isinstance(pipe.verifier, SpatialDraftVerifier) and pipe.heads is not None


def test_filters_of_the_pipeline_s_verifier_hold_for_all_decoders(tmp_path):
    pipe = tiny_pipeline(side=16, image_vocab_size=16, hidden_size=16, num_layers=1)
    pipe.verifier = SpatialDraftVerifier(top_k=3)
    compare_decoders(pipe, DECODERS[:2], evaluation_tasks(6), tmp_path, timed=0)
    described = [
        json.loads((tmp_path / f"{name}.json").read_text())["decoder"]["settings"] for name in ("ar", "lossless")
    ]
    assert [settings["top_k"] for settings in described] == [3, 3]


def test_the_first_decoder_has_to_be_the_reference(pipe, tmp_path):
    with pytest.raises(ValueError, match="first decoder has to be AutoregressiveVerifier"):
        compare_decoders(pipe, DECODERS[1:], evaluation_tasks(6), tmp_path)


def test_the_log_likelihood_is_that_of_drawing_code_by_code(pipe):
    """The mean over a picture's own autoregressive draws lies near minus the entropy, and other codes lie far below."""
    tasks = evaluation_tasks(6)
    pipe.verifier = AutoregressiveVerifier()
    drawn = pipe(
        [task.prompt for task in tasks], generator=torch.Generator().manual_seed(0), output_type="latent"
    ).codes
    shuffled = drawn.flatten(1)[:, torch.randperm(256, generator=torch.Generator().manual_seed(0))].view_as(drawn)
    assert log_likelihood(pipe, drawn, tasks) > log_likelihood(pipe, shuffled, tasks) + 0.1
    assert log_likelihood(pipe, drawn, tasks, batch_size=4) == pytest.approx(log_likelihood(pipe, drawn, tasks))


def figures(passes, score) -> DecoderFigures:
    return DecoderFigures(passes, 1.0, score, 0.01, {}, 1.0, -0.1, 20.0, 2.0, 0.1, {})


def test_the_pareto_front_holds_what_nothing_beats_in_both():
    rows = {"a": figures(10, 0.2), "b": figures(20, 0.1), "c": figures(30, 0.5), "d": figures(30, 0.4)}
    assert pareto_front(rows) == ["a", "c"]


def test_table_and_plot_are_written(measured, tmp_path):
    _, rows = measured
    write_csv(rows, tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0].startswith("decoder,passes") and len(lines) == 4
    plot(rows, {decoder.name: decoder.group for decoder in DECODERS}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_every_row_has_its_own_name_and_the_quick_ones_exist():
    names = [decoder.name for decoder in all_decoders()]
    assert len(set(names)) == len(names)
    assert set(QUICK) <= set(names)


@pytest.mark.parametrize("name", ["ZipAR, lead 4", "scan, heads fused", "SJD, window 16", "SSD paper, r=2", "1D-MTP"])
def test_every_kind_of_decoder_can_be_timed(pipe, name):
    decoder = next(decoder for decoder in all_decoders() if decoder.name == name)
    report = measure_latency(pipe, decoder.verifier, "a photo of a red circle", repeats=1)
    assert report.nfe < report.ar_nfe
    assert 0 < report.bare_seconds
