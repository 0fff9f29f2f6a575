"""The finality rule: which tokens of a window are final after a round, and how far the cache may keep them.

A token is *exact* if all tokens before it were fed as they are now. The tokens up to and including the first one that
a round changed are exact: the backbone predicted each of them from final tokens. So the keys and values before that
first change are those of the final tokens, and stay in the cache.

Lossless decoding makes exact tokens final, and no others. Decoding in rounds also makes a token final that has had its
rounds, unless refresh has just resampled it or the backbone finds it unlikely.
"""

from dataclasses import dataclass

import torch

from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import OpenWindow, RollingMemory


@dataclass(frozen=True)
class Round:
    """What a round did to a window; all tensors `(batch, width)`.

    Args:
        is_open: `bool`: draft tokens that the round has resampled.
        rounds: `int64`: verification rounds of each, this one included.
        first_change: `int64 (batch, 1)`: the first column that changed; the width if none did.
        undecided: `bool`: tokens that need a further round whatever their number of rounds; `None` for none.
    """

    is_open: torch.Tensor
    rounds: torch.Tensor
    first_change: torch.Tensor
    undecided: torch.Tensor | None = None


@dataclass(frozen=True)
class FinalityRule:
    """When a draft token is final.

    Args:
        first_row_rounds, rounds: verification rounds after which a draft token of the first row, or of another one, is
            final; `None`: only exact tokens are.
        adaptive: whether exact tokens are final whatever their rounds.
        confidence_threshold: a token of less probability under the backbone stays open until it is exact.
    """

    first_row_rounds: int | None = None
    rounds: int | None = None
    adaptive: bool = True
    confidence_threshold: float | None = None

    @property
    def exact_only(self) -> bool:
        return self.rounds is None

    def limit(self, row: int) -> int | None:
        """Rounds after which a draft token of a row is final."""
        return self.first_row_rounds if row == 0 else self.rounds

    def still_open(self, window: OpenWindow, memory: RollingMemory, drafts: torch.Tensor) -> torch.Tensor:
        """Of the draft tokens `bool (batch, width)`, those that a round may still change."""
        return drafts if self.exact_only else drafts & ~window.read(memory.frozen)

    def settle(self, state: DecodingState, window: OpenWindow, done: Round) -> None:
        """Move `state.settled` past the tokens that are final now, and `state.committed` past those to be cached."""
        memory, is_open = RollingMemory.of(state), done.is_open
        column = torch.arange(window.width, device=is_open.device)
        if not self.exact_only:
            enough = is_open & (done.rounds >= self._limits(state, window.positions))
            if done.undecided is not None:
                enough &= ~done.undecided | (column <= done.first_change)  # a further round can't improve exact tokens
            window.write(memory.frozen, enough | window.read(memory.frozen))
            is_open = is_open & ~enough
        if self.adaptive:
            is_open = is_open & (column > done.first_change)
        # Everything before the first column that is still open is final.
        num_final = torch.where(is_open, column, window.width).amin(1)
        # The host waits here, once a pass: it has to know where the next window lies.
        both = torch.minimum(torch.stack([done.first_change[:, 0], num_final]).cpu(), window.lengths)
        memory.unchanged = (both == window.lengths).all(0).tolist()
        unchanged, final = both + window.num_final
        active = state.settled < state.grid.length
        state.settled = torch.where(active, state.committed + final, state.settled)
        state.committed = torch.where(active, state.committed + torch.minimum(unchanged, final), state.committed)

    def settle_drafts(self, state: DecodingState, before: torch.Tensor) -> None:
        """Of new draft tokens, those after `before` `int64 (batch,)`: settle what needs no round.

        After a window that a round left unchanged, the next cell was predicted from final tokens: it is exact. With 0
        rounds, draft tokens are final as they are drawn.
        """
        grid = state.grid
        follows = (state.settled == before) & (state.drafted > before)
        if self.adaptive:
            exact = follows & torch.tensor(RollingMemory.of(state).unchanged)
            next_cell = state.settled + 1
            # A forced row end goes with the last code of its row.
            next_cell = next_cell + (next_cell % grid.stride == grid.columns) * int(grid.row_end)
            state.settled = torch.where(exact, torch.minimum(next_cell, state.drafted), state.settled)
        if 0 in (self.first_row_rounds, self.rounds):
            unverified = torch.tensor([self.limit(at // grid.stride) == 0 for at in before.tolist()])
            state.settled = torch.where(follows & unverified, state.drafted, state.settled)

    def _limits(self, state: DecodingState, positions: torch.Tensor) -> torch.Tensor | int:
        first_row, others = self.first_row_rounds or 0, self.rounds or 0
        if first_row == others:
            return others
        return torch.where(positions < state.grid.stride, first_row, others)
