"""Filling a window with drafts up to its end, wherever in a row that lies; every picture of a batch has its own.

The first row is drafted from the left, by the horizontal heads. Below it a cell is foreseen from the row above by the
first vertical head; what then stands to its left is for row refresh to see. What the heads foresee stands in for the
state of a cell until a pass has fed it, so that drafts can be drafted from.
"""

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
        # Within a row's length, all that a cell is foreseen from is drafted before it.
        first_row = state.drafted < grid.stride
        if draft in GUESSES:
            reach = ends
        else:
            reach = state.drafted + torch.where(first_row, 1 + horizontal_block, grid.columns - 1)
            reach = torch.where(first_row, reach.clamp_max(grid.stride), reach)
        stops = torch.maximum(torch.minimum(reach, ends), state.drafted)
        if grid.row_end:
            stops += stops % grid.stride == grid.columns  # a forced row end goes with the last code of its row
        for along in (True, False):
            chosen = (stops > state.drafted) & (first_row == along)
            if not bool(chosen.any()):
                continue
            pictures = chosen.nonzero().squeeze(1)
            positions = cells_between(grid, state.drafted[chosen], stops[chosen]).to(state.sequence.device)
            fresh = (state.drafted == begins)[chosen].to(state.sequence.device)
            pictures = pictures.to(state.sequence.device)
            span = int(state.drafted[chosen].min()), int(stops[chosen].max())
            if draft in GUESSES:
                _guess(state, pictures, positions, span, draft, coupling)
            elif along:
                _along(state, pictures, positions, span, fresh, draft, coupling)
            else:
                _below(state, pictures, positions, span, fresh, draft, coupling)
        state.drafted = stops


def _guess(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    span: tuple[int, int],
    draft: str,
    coupling: str,
) -> None:
    """The first position from its own state; a guess for those behind it."""
    first = positions[:, :1]
    logits = state.head(state.states_at(pictures, first))
    write_drafts(state, pictures, first, span, logits, 0, coupling)
    if positions.shape[1] > 1:
        # A picture with one position has it repeated here, where it must not be drawn again.
        more = (positions[:, -1] > positions[:, 0]).nonzero().squeeze(1)
        write_guesses(state, pictures[more], positions[more, 1:], span, draft, logits.shape[-1], coupling)


def _along(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    span: tuple[int, int],
    fresh: torch.Tensor,
    draft: str,
    coupling: str,
) -> None:
    """The first position from its own state, and those behind it from that one by the horizontal heads."""
    source = positions[:, :1]
    if not bool(fresh.all()):
        known = state.states_at(pictures, source)
        state.foresee(pictures, source, _choose(fresh[:, None], known, predict_from_neighbors(state, pictures, source)))
    greedy = draft == "argmax"
    logits = state.head(state.states_at(pictures, source))
    write_drafts(state, pictures, source, span, logits, (~fresh[:, None]).long(), coupling, greedy and ~fresh[:, None])
    if positions.shape[1] == 1:
        return
    offsets = (positions - source)[:, 1:]
    predicted = predict_along(state, pictures, source, offsets)
    state.foresee(pictures, positions[:, 1:], predicted)
    write_drafts(state, pictures, positions[:, 1:], span, state.head(predicted), offsets, coupling, greedy)


def _below(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    span: tuple[int, int],
    fresh: torch.Tensor,
    draft: str,
    coupling: str,
) -> None:
    """From the row above; a first position has a state of its own."""
    assert state.heads is not None
    known = torch.arange(state.grid.length) < state.drafted[:, None]
    above = features_above(state, pictures, positions, known.to(positions.device))
    predicted = predict_from_above(state, above)
    own = torch.zeros_like(positions, dtype=torch.bool)
    own[:, 0] = fresh
    own = own & (positions == positions[:, :1])
    predicted = _choose(own, state.states_at(pictures, positions), predicted)
    offset = (~own).long()
    greedy = ~own & (draft == "argmax")
    state.foresee(pictures, positions, predicted)
    write_drafts(state, pictures, positions, span, state.head(predicted), offset, coupling, greedy)


def _choose(where: torch.Tensor, these: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """States `(n or 2 n, k, hidden_size)` by a mask `(n, k)` that both branches share."""
    both = where if len(these) == len(where) else torch.cat([where, where])
    return torch.where(both[..., None], these, others)
