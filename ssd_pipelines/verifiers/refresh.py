"""Row refresh: resample tokens whose prediction is stale from the heads, before a pass verifies them.

After a round, the backbone's prediction of a cell whose left neighbour has changed is stale: it was made with the old
neighbour in the context. A head that sees the new neighbour, and the row above, predicts better. Cells that were
drafted from the row above alone gain likewise, once there is a token to their left. A sweep is parallel over cells and
pictures. Ours, not in arXiv 2606.20543.
"""

from dataclasses import dataclass

import torch

from ssd_pipelines.verifiers.draft_tokens import cells_between, write_drafts
from ssd_pipelines.verifiers.predictions import predict_from_neighbors
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import RollingMemory, RollingWindow


@dataclass(frozen=True)
class Refresh:
    """When which predictions are refreshed.

    Args:
        sweeps: how often; each further sweep follows the changes of the one before.
        coupling: of the verifier.
        greedy: take the likeliest code where new draft tokens are refreshed.
        with_drafts: refresh stale predictions together with new draft tokens, after drafting. Otherwise within the
            round, so that finality can wait for the tokens that were resampled.
        new_drafts: refresh new draft tokens, if there is a row head.
    """

    sweeps: int
    coupling: str
    greedy: bool = False
    with_drafts: bool = True
    new_drafts: bool = True

    def in_round(
        self, state: DecodingState, window: RollingWindow, changed: torch.Tensor, movable: torch.Tensor
    ) -> torch.Tensor | None:
        """Note which predictions a round has made stale and, unless that is done with drafts, refresh them.

        Args:
            changed: `bool (batch, width)`: the tokens that the round changed.
            movable: `bool (batch, width)`: the tokens that may be resampled.

        Returns:
            `bool (batch, width)`: what was resampled, to the same code or another; `None` without a refresh.
        """
        memory = RollingMemory.of(state)
        memory.stale = window.write(torch.zeros_like(memory.stale), changed).roll(1, 1)
        if self.with_drafts:
            return None
        resampled = torch.zeros_like(memory.stale)
        everywhere = window.write(torch.zeros_like(memory.stale), movable)
        with state.clock.phase("drafting"):
            refresh(
                state,
                memory.stale,
                everywhere,
                state.settled,
                state.drafted,
                self.sweeps,
                self.coupling,
                resampled=resampled,
            )
        return window.read(resampled)

    def after_drafting(self, state: DecodingState, before: torch.Tensor) -> None:
        """Refresh new draft tokens and, if that was left for now, stale predictions.

        Args:
            before: `int64 (batch,)` on the CPU: where the draft tokens ended before. The first of the new ones is the
                backbone's own prediction.
        """
        memory, positions = RollingMemory.of(state), torch.arange(state.grid.length)
        has_row_head = state.heads is not None and state.heads.row is not None
        is_new = (positions > before[:, None]).to(memory.stale.device)
        if self.with_drafts:
            starts = state.settled
            stale = memory.stale | is_new if has_row_head else memory.stale
        elif has_row_head and self.new_drafts:
            # The first row was drafted from a state that a pass has brought, which is better than a refresh.
            starts, stale = before.clamp_min(state.grid.stride), is_new
        else:
            return
        movable = (positions >= starts[:, None]) & (positions < state.drafted[:, None])
        refresh(
            state,
            stale,
            movable.to(stale.device),
            starts,
            state.drafted,
            self.sweeps,
            self.coupling,
            greedy=self.greedy,
        )


def refresh(
    state: DecodingState,
    stale: torch.Tensor,
    movable: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    sweeps: int,
    coupling: str,
    greedy: bool = False,
    resampled: torch.Tensor | None = None,
) -> None:
    """Resample stale tokens, and in every further sweep those whose left neighbour the last sweep changed.

    Args:
        stale: `bool (batch, length)`: what the first sweep resamples.
        movable: same shape: what any sweep may resample.
        starts, stops: `int64 (batch,)` on the CPU: all movable tokens lie between them.
        sweeps: number of sweeps.
        coupling: of the verifier.
        greedy: take the likeliest code.
        resampled: `bool (batch, length)`; set where a token was resampled, to the same code or another.
    """
    active = (stops > starts).nonzero().squeeze(1)
    if not len(active) or not sweeps:
        return
    positions = cells_between(state.grid, starts[active], stops[active]).to(state.sequence.device)
    span = int(starts[active].min()), int(stops[active].max())
    pictures = active.to(positions.device)
    rows = pictures[:, None]
    # Which columns are computed may depend on other pictures only if drawing takes no numbers from a generator. And
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
        state.hidden.predict(pictures, at, predicted, few)
        if resampled is not None:
            resampled[rows, at] |= few
        chosen = may & (state.sequence != before)[rows, left]
