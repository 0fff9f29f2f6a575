"""Filling a window with drafts up to its end, wherever in a row that lies; every picture of a batch has its own.

The first row is drafted from the left, by the horizontal heads. Below it a cell is foreseen from the row above by the
first vertical head; what then stands to its left is for row refresh to see. What the heads foresee stands in for the
state of a cell until a pass has fed it, so that drafts can be drafted from.
"""

from dataclasses import dataclass

import torch

from ssd_pipelines.verifiers.base import DecodingState
from ssd_pipelines.verifiers.drafting import cells_between, write_drafts, write_guesses
from ssd_pipelines.verifiers.neighbors import features_above, predict_along, predict_from_above, predict_from_neighbors


GUESSES = ("random", "left", "above")
"""Drafts that need no heads."""


def fill_window(
    state: DecodingState,
    ends: torch.Tensor,
    draft: str,
    coupling: str,
    horizontal_block: int = 1,
) -> None:
    """Draft from `state.drafted` to `ends` in every picture, and move `state.drafted` there.

    Args:
        ends: `int64 (batch,)` on the CPU, in sequence positions; none lies between a row's last code and its row end.
        draft: "sample" or "argmax" of what the heads foresee, or one of `GUESSES`.
        coupling: of the verifier.
        horizontal_block: how far the horizontal heads see; the first row takes as many and one at a time.
    """
    grid = state.grid
    begins = state.drafted
    while bool((state.drafted < ends).any()):
        # Within a row's length all that a cell is foreseen from is drafted before it, but above right of the last.
        first_row = state.drafted < grid.stride
        if draft in GUESSES:
            reach = ends
        else:
            reach = state.drafted + torch.where(first_row, 1 + horizontal_block, grid.columns)
            reach = torch.where(first_row, reach.clamp_max(grid.stride), reach)
        stops = torch.maximum(torch.minimum(reach, ends), state.drafted)
        if grid.row_end:
            stops += stops % grid.stride == grid.columns  # a forced row end goes with the last code of its row
        for along in (True, False):
            chosen = (stops > state.drafted) & (first_row == along)
            if not bool(chosen.any()):
                continue
            cells = New.between(state, chosen, stops, fresh=state.drafted == begins)
            if draft in GUESSES:
                _guess(state, cells, draft, coupling)
            elif along:
                _along(state, cells, draft, coupling)
            else:
                _below(state, cells, draft, coupling)
        state.drafted = stops


@dataclass(frozen=True)
class New:
    """Cells to be drafted together.

    Args:
        pictures: `(n,)`.
        positions: `int64 (n, k)`, each picture's own in sequence; one that has fewer than others repeats its last.
        span: the least position, and one more than the largest.
        fresh: `bool (n,)`: whether a pass has brought the state of a picture's first position.
        several: `(m,)`, which of the pictures have more than one position.
    """

    pictures: torch.Tensor
    positions: torch.Tensor
    span: tuple[int, int]
    fresh: torch.Tensor
    several: torch.Tensor

    @classmethod
    def between(cls, state: DecodingState, chosen: torch.Tensor, stops: torch.Tensor, fresh: torch.Tensor) -> "New":
        """From `state.drafted` to `stops` in the chosen pictures; all on the CPU, so that the host needn't wait."""
        device, starts, stops = state.sequence.device, state.drafted[chosen], stops[chosen]
        positions = cells_between(state.grid, starts, stops)
        return cls(
            pictures=chosen.nonzero().squeeze(1).to(device),
            positions=positions.to(device),
            span=(int(starts.min()), int(stops.max())),
            fresh=fresh[chosen].to(device),
            several=(positions[:, -1] > positions[:, 0]).nonzero().squeeze(1).to(device),
        )

    def behind(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the pictures that have several positions: which they are, and all but their first position."""
        return self.pictures[self.several], self.positions[self.several, 1:]


def _guess(state: DecodingState, cells: New, draft: str, coupling: str) -> None:
    """The first position from its own state; a guess for those behind it."""
    first = cells.positions[:, :1]
    logits = state.head(state.states_at(cells.pictures, first))
    write_drafts(state, cells.pictures, first, cells.span, logits, 0, coupling)
    if len(cells.several):
        write_guesses(state, *cells.behind(), cells.span, draft, logits.shape[-1], coupling)


def _along(state: DecodingState, cells: New, draft: str, coupling: str) -> None:
    """The first position from its own state, and those behind it from that one by the horizontal heads."""
    pictures, source, foreseen = cells.pictures, cells.positions[:, :1], ~cells.fresh[:, None]
    # Where no pass has brought its state yet, the left neighbour has to do.
    predicted = _choose(foreseen, predict_from_neighbors(state, pictures, source), state.states_at(pictures, source))
    state.foresee(pictures, source, predicted)
    greedy = draft == "argmax"
    write_drafts(
        state, pictures, source, cells.span, state.head(predicted), foreseen.long(), coupling, foreseen & greedy
    )
    if len(cells.several):
        (pictures, rest), source = cells.behind(), source[cells.several]
        offsets = rest - source
        predicted = predict_along(state, pictures, source, offsets)
        state.foresee(pictures, rest, predicted)
        write_drafts(state, pictures, rest, cells.span, state.head(predicted), offsets, coupling, greedy)


def _below(state: DecodingState, cells: New, draft: str, coupling: str) -> None:
    """From the row above; a first position has a state of its own."""
    pictures, positions = cells.pictures, cells.positions
    known = torch.arange(state.grid.length) < state.drafted[:, None]
    above = features_above(state, pictures, positions, known.to(positions.device))
    own = cells.fresh[:, None] & (positions == positions[:, :1])
    predicted = _choose(own, state.states_at(pictures, positions), predict_from_above(state, above))
    state.foresee(pictures, positions, predicted)
    greedy = ~own & (draft == "argmax")
    write_drafts(state, pictures, positions, cells.span, state.head(predicted), (~own).long(), coupling, greedy)


def _choose(where: torch.Tensor, these: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """States `(n or 2 n, k, hidden_size)` by a mask `(n, k)` that both branches share."""
    both = where if len(these) == len(where) else torch.cat([where, where])
    return torch.where(both[..., None], these, others)
