import pytest
import torch

from ssd_pipelines.grid import ROW_END, UNDRAWN, TokenGrid


def test_a_grid_with_row_ends_has_one_more_position_a_row():
    grid = TokenGrid(rows=48, columns=48, row_end=True)
    assert (grid.stride, grid.length) == (49, 2352)
    assert TokenGrid(24, 24).length == 576
    assert TokenGrid(90, 90, row_end=True).length == 8190


def test_directly_below_is_one_stride_later():
    grid = TokenGrid(3, 4, row_end=True)
    assert grid.sequence_index(2, 1) - grid.sequence_index(1, 1) == grid.stride
    assert grid.row_slice(1, 2) == slice(5, 15)


def test_row_ends_are_forced_and_never_shown():
    grid = TokenGrid(2, 3, row_end=True)
    sequence = grid.empty_sequence(1)
    assert sequence.tolist() == [[UNDRAWN] * 3 + [ROW_END] + [UNDRAWN] * 3 + [ROW_END]]
    assert grid.to_codes(sequence).shape == (1, 2, 3)
    assert grid.is_code(2, 6).tolist() == [True, False, True, True]


def test_codes_are_a_view_of_the_sequence():
    grid = TokenGrid(2, 3, row_end=True)
    sequence = grid.empty_sequence(2)
    grid.to_codes(sequence)[:] = torch.arange(6).view(1, 2, 3)
    assert sequence[1].tolist() == [0, 1, 2, ROW_END, 3, 4, 5, ROW_END]


def test_a_cell_outside_the_grid_is_refused():
    with pytest.raises(IndexError, match=r"\(2, 0\) lies outside the 2 x 3"):
        TokenGrid(2, 3).sequence_index(2, 0)
    with pytest.raises(ValueError, match="at least one row"):
        TokenGrid(0, 3)
