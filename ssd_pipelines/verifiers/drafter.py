"""The drafter: fills the cells up to given ends with draft tokens, every picture of a batch from where it stands.

The first row is drafted from the left by the horizontal heads, every row below it from the row above by the vertical
heads. The very first cell is special: a pass has brought the backbone's own prediction of it.

Sources: arXiv 2606.20543, sections 3.2 and 3.3. Drafting from drafted cells, through their predicted states, is ours.
"""

from dataclasses import dataclass

import torch

from ssd_pipelines.verifiers.draft_tokens import cells_between, write_drafts, write_drafts_without_heads
from ssd_pipelines.verifiers.predictions import (
    features_above,
    predict_along,
    predict_from_above,
    predict_from_neighbors,
)
from ssd_pipelines.verifiers.state import DecodingState


WITHOUT_HEADS = ("random", "left", "above")
"""Kinds of draft that need no heads: random codes, and copies of a neighbour."""


@dataclass(frozen=True)
class NewCells:
    """Cells to be drafted in one step.

    Args:
        pictures: `int64 (n,)`, indices within the batch.
        positions: `int64 (n, k)`, ascending; a picture that has fewer than others repeats its last one.
        span: the smallest position, and one more than the largest.
        fresh: `bool (n,)`: whether a pass has brought the state that predicts a picture's first position.
        several: `int64 (m,)`: which of the pictures have more than one position.
    """

    pictures: torch.Tensor
    positions: torch.Tensor
    span: tuple[int, int]
    fresh: torch.Tensor
    several: torch.Tensor

    @classmethod
    def between(
        cls, state: DecodingState, chosen: torch.Tensor, stops: torch.Tensor, fresh: torch.Tensor
    ) -> "NewCells":
        """From `state.drafted` to `stops` in the chosen pictures; all on the CPU, so that the host need not wait."""
        device, starts, stops = state.sequence.device, state.drafted[chosen], stops[chosen]
        positions = cells_between(state.grid, starts, stops)
        return cls(
            pictures=chosen.nonzero().squeeze(1).to(device),
            positions=positions.to(device),
            span=(int(starts.min()), int(stops.max())),
            fresh=fresh[chosen].to(device),
            several=(positions[:, -1] > positions[:, 0]).nonzero().squeeze(1).to(device),
        )

    def after_first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the pictures that have several positions: which they are, and all but their first position."""
        return self.pictures[self.several], self.positions[self.several, 1:]


@dataclass(frozen=True)
class Drafter:
    """Where draft tokens come from.

    Args:
        draft: "sample" or "argmax" of what the heads predict, or one of `WITHOUT_HEADS`.
        coupling: of the verifier.
        horizontal_block: cells that the horizontal heads draft from one source cell.
        horizontal_only: draft every row along itself.
        chained: draft from drafted cells too, whose predicted states take the place of the backbone's until a pass has
            fed them. Otherwise row d of a block comes from the row above the block, by vertical head d.
    """

    draft: str
    coupling: str
    horizontal_block: int = 1
    horizontal_only: bool = False
    chained: bool = True

    def fill(self, state: DecodingState, ends: torch.Tensor) -> None:
        """Draft from `state.drafted` to `ends` in every picture, and move `state.drafted` there.

        Args:
            ends: `int64 (batch,)` on the CPU, sequence positions; none lies between a row's last code and its row end.
        """
        grid, begins, distance = state.grid, state.drafted, 0
        while bool((state.drafted < ends).any()):
            distance += 1
            along = (state.drafted < grid.stride) | self.horizontal_only
            stops = torch.maximum(torch.minimum(self._reach(state, along, ends), ends), state.drafted)
            if grid.row_end:
                stops += stops % grid.stride == grid.columns  # a forced row end goes with the last code of its row
            for is_along in (True, False):
                chosen = (stops > state.drafted) & (along == is_along)
                if not bool(chosen.any()):
                    continue
                cells = NewCells.between(state, chosen, stops, fresh=state.drafted == begins)
                if self.draft in WITHOUT_HEADS:
                    self._without_heads(state, cells)
                elif is_along:
                    self._along(state, cells)
                else:
                    self._below(state, cells, 1 if self.chained else distance)
            state.drafted = stops

    def _reach(self, state: DecodingState, along: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """How far one step can draft, `int64 (batch,)`."""
        if self.draft in WITHOUT_HEADS:
            return ends
        grid = state.grid
        # Below the first row, the cell above is known for as many cells as a row has.
        below = state.drafted + grid.columns
        end_of_row = (state.drafted // grid.stride + 1) * grid.stride
        return torch.where(along, torch.minimum(state.drafted + 1 + self.horizontal_block, end_of_row), below)

    def _without_heads(self, state: DecodingState, cells: NewCells) -> None:
        """The first position from its own state, copies or random codes after it."""
        first = cells.positions[:, :1]
        logits = state.head(state.hidden.at(cells.pictures, first))
        write_drafts(state, cells.pictures, first, cells.span, logits, 0, self.coupling)
        if len(cells.several):
            kind = "left" if self.horizontal_only and self.draft == "above" else self.draft
            pictures, rest = cells.after_first()
            write_drafts_without_heads(state, pictures, rest, cells.span, kind, logits.shape[-1], self.coupling)

    def _along(self, state: DecodingState, cells: NewCells) -> None:
        """The first position from its own state, and those after it from that one by the horizontal heads."""
        pictures, source, greedy = cells.pictures, cells.positions[:, :1], self.draft == "argmax"
        own, is_predicted = state.hidden.at(pictures, source), ~cells.fresh[:, None]
        if self.chained:
            # Where no pass has brought a state yet, the left neighbour predicts it.
            own = _choose(is_predicted, predict_from_neighbors(state, pictures, source), own)
            state.hidden.predict(pictures, source, own)
        offset, likeliest = is_predicted.long(), is_predicted & greedy
        write_drafts(state, pictures, source, cells.span, state.head(own), offset, self.coupling, likeliest)
        if len(cells.several):
            (pictures, rest), source = cells.after_first(), source[cells.several]
            offset = rest - source
            predicted = predict_along(state, pictures, source, offset)
            if self.chained:
                state.hidden.predict(pictures, rest, predicted)
            write_drafts(state, pictures, rest, cells.span, state.head(predicted), offset, self.coupling, greedy)

    def _below(self, state: DecodingState, cells: NewCells, distance: int) -> None:
        """From a row above by the vertical head of that distance; a fresh first position from its own state."""
        pictures, positions = cells.pictures, cells.positions
        known = torch.arange(state.grid.length) < state.drafted[:, None]
        source = positions - (distance - 1) * state.grid.stride
        above = features_above(state, pictures, source, known.to(positions.device))
        is_own = cells.fresh[:, None] & (positions == positions[:, :1])
        own = state.hidden.at(pictures, positions)
        predicted = _choose(is_own, own, predict_from_above(state, above, distance))
        if self.chained:
            state.hidden.predict(pictures, positions, predicted)
        offset, greedy = torch.where(is_own, 0, distance), ~is_own & (self.draft == "argmax")
        write_drafts(state, pictures, positions, cells.span, state.head(predicted), offset, self.coupling, greedy)


def _choose(where: torch.Tensor, these: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """States `(n or 2 * n, k, hidden_size)` by a mask `(n, k)` that both branches share."""
    both = where if len(these) == len(where) else torch.cat([where, where])
    return torch.where(both[..., None], these, others)
