import time

import pytest
import torch

from ssd_pipelines.grid import Cells, Span
from ssd_pipelines.pipeline_output import AcceptanceKey, DecodingStats, PhaseClock


def test_a_phase_within_another_counts_for_itself_alone():
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("outer"):
        time.sleep(0.01)
        with clock.phase("inner"):
            time.sleep(0.03)
    seconds = clock.seconds()
    assert seconds["inner"] >= 0.03 > seconds["outer"] >= 0.009
    assert seconds["total"] >= seconds["inner"] + seconds["outer"]


def test_passes_are_counted_for_the_batch_and_for_each_picture():
    stats = DecodingStats(tokens=10)
    stats.record_pass(Span(0, 0), torch.tensor([True, True]))
    stats.record_pass(Cells(torch.tensor([[3, 4], [2, 2]]), 2, 5), torch.tensor([True, False]))
    assert (stats.nfe, stats.passes, stats.windows) == (2, [2, 1], [(0, 0), (2, 4)])
    assert stats.tokens_per_pass == 5


def test_rounds_of_any_cells_are_binned_by_direction_offset_and_round():
    stats = DecodingStats()
    accepted = torch.tensor([[True, False, True, True, True]])
    verified = torch.tensor([[True, True, True, False, True]])
    positions = torch.tensor([[3, 4, 5, 6, 7]])
    offset, rounds = torch.tensor([[3, 1, 1, 1, 0]]), torch.tensor([[1, 1, 1, 2, 1]])
    for _ in range(2):
        stats.record_round(accepted, verified, positions, offset, rounds, first_vertical=4)
    assert stats.acceptance == {AcceptanceKey("horizontal", 3, 1): 1.0, AcceptanceKey("vertical", 1, 1): 0.5}
    assert stats.acceptance_rate == pytest.approx(4 / 6)
