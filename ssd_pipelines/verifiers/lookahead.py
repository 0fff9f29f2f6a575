"""The lookahead rule: how far to draft, before the next pass is made."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import RollingMemory


LEAST_WINDOW = 64
"""Positions of a lossless window whose rows are short: on a GPU they cost little more than one, and two short rows are
fewer."""


class Lookahead(ABC):
    """How far to draft."""

    @abstractmethod
    def ends(self, state: DecodingState) -> torch.Tensor:
        """Where the draft tokens of each picture are to end, `int64 (batch,)` on the CPU; `state.drafted` for no more.

        No end lies between a row's last code and its row end.
        """


@dataclass(frozen=True)
class LookaheadWindow(Lookahead):
    """So far that a pass feeds `length` positions, wherever in a row that ends.

    Args:
        length: by default two rows, and no fewer than `LEAST_WINDOW`.
    """

    length: int | None = None

    def length_on(self, grid: TokenGrid) -> int:
        """Positions that a pass feeds on this grid."""
        return self.length or max(2 * grid.stride, LEAST_WINDOW)

    def ends(self, state: DecodingState) -> torch.Tensor:
        grid = state.grid
        # The backbone has predicted the next cell itself: that one is drafted however many final ones are to be fed.
        ends = torch.maximum(state.committed + self.length_on(grid), state.settled + 1)
        return (ends + (ends % grid.stride == grid.columns) * int(grid.row_end)).clamp_max(grid.length)


@dataclass(frozen=True)
class LookaheadSegments(Lookahead):
    """The next segment, a few cells of a row or a block of rows, once the one before has had its rounds.

    Args:
        horizontal_block: cells of a segment in the first row, after its first.
        block_size: rows of a segment below it.
        horizontal_only: divide every row like the first.
        first_row_lag, lag: rounds that the segment before must have had, in the first row and below it.
        window: draft by this window instead of by rounds: whatever segments lie within it.
    """

    horizontal_block: int
    block_size: int
    horizontal_only: bool
    first_row_lag: int
    lag: int
    window: LookaheadWindow | None = None

    def ends(self, state: DecodingState) -> torch.Tensor:
        memory, grid = RollingMemory.of(state), state.grid
        rounds = self._rounds_of_last(state, memory)
        ends = []
        positions = zip(state.committed.tolist(), state.settled.tolist(), state.drafted.tolist(), strict=True)
        for b, (committed, settled, drafted) in enumerate(positions):
            end = self.segment_end(grid, drafted)
            if settled < drafted and not self._is_ready(grid, committed, drafted, end, rounds[b]):
                end = drafted
            if end > drafted:
                rounds[b] = 0
            ends.append(end)
        memory.last_rounds = rounds
        return torch.tensor(ends)

    def segment_end(self, grid: TokenGrid, drafted: int) -> int:
        """Where the segment ends that begins at `drafted`."""
        row = drafted // grid.stride
        if row == grid.rows:
            return drafted
        if row > 0 and not self.horizontal_only:
            return min(row + self.block_size, grid.rows) * grid.stride
        end_of_row = row * grid.stride + grid.columns
        end = min(drafted + 1 + self.horizontal_block, end_of_row)
        # A forced row end goes with the last code of its row.
        return end + int(grid.row_end and end == end_of_row)

    def _is_ready(self, grid: TokenGrid, committed: int, drafted: int, end: int, rounds: int) -> bool:
        """Whether a segment may be drafted before all tokens that precede it are final."""
        if self.window is not None:
            return end - committed <= self.window.length_on(grid)
        return rounds >= (self.first_row_lag if self.horizontal_only or drafted < grid.stride else self.lag)

    @staticmethod
    def _rounds_of_last(state: DecodingState, memory: RollingMemory) -> list[int]:
        """By picture, the rounds of its last draft token."""
        last = (state.drafted - 1).clamp_min(0)
        last = last - (last % state.grid.stride == state.grid.columns).long()  # that of a row end is its row's last
        return memory.rounds.gather(1, last.to(memory.rounds.device)[:, None]).squeeze(1).tolist()
