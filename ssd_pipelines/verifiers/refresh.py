"""Row refresh: tokens whose left neighbour has changed are drawn again from the heads, before a pass looks at them.

The backbone's prediction of such a token is stale, for it was made beside the old neighbour. A head that is told the
new one, and sees the row above, foresees better. Cells that were drafted from the row above alone gain likewise once
something stands to their left. All sweeps are parallel over cells and pictures. Ours, not in arXiv 2606.20543.
"""

import torch

from ssd_pipelines.verifiers.base import DecodingState
from ssd_pipelines.verifiers.drafting import cells_between, write_drafts
from ssd_pipelines.verifiers.neighbors import predict_from_neighbors


def refresh(
    state: DecodingState,
    stale: torch.Tensor,
    movable: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    sweeps: int,
    coupling: str,
    greedy: bool = False,
    redrawn: torch.Tensor | None = None,
) -> None:
    """Redraw stale tokens, and in every further sweep those whose left neighbour the last one changed.

    Args:
        stale: `bool (batch, length)`: what the first sweep redraws.
        movable: same shape: what any sweep may redraw.
        starts, stops: `int64 (batch,)` on the CPU: between which positions all movable tokens lie.
        sweeps: how many.
        coupling: of the verifier.
        greedy: take the likeliest code.
        redrawn: `bool (batch, length)` to mark in what is redrawn, be it to the code that it was.
    """
    active = (stops > starts).nonzero().squeeze(1)
    if not len(active) or not sweeps:
        return
    positions = cells_between(state.grid, starts[active], stops[active]).to(state.sequence.device)
    span = int(starts[active].min()), int(stops[active].max())
    pictures = active.to(positions.device)
    rows = pictures[:, None]
    # Whether a picture draws must not depend on its neighbours, unless drawing takes nothing from its generator. And
    # only on a CPU the host can look at what is stale without waiting.
    narrow = coupling == "gumbel" and positions.device.type == "cpu"
    # The first column has no left neighbour.
    may = movable[rows, positions] & (positions % state.grid.stride > 0)
    left = (positions - 1).clamp_min(0)
    chosen = may & stale[rows, positions]
    for _ in range(sweeps):
        columns: torch.Tensor | slice = slice(None)
        if narrow:
            columns = chosen.any(0).nonzero().squeeze(1)
            if not len(columns):
                return
        at, few = positions[:, columns], chosen[:, columns]
        before = state.sequence.clone()
        predicted = predict_from_neighbors(state, pictures, at)
        write_drafts(state, pictures, at, span, state.head(predicted), None, coupling, greedy, few)
        state.foresee(pictures, at, predicted, few)
        if redrawn is not None:
            redrawn[rows, at] |= few
        chosen = may & (state.sequence != before)[rows, left]
