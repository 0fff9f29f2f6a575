"""The finality rule: which tokens of a window are final after a round, and how far the cache may keep them.

A token is *exact* if the backbone drew it in this round, and every token before it was fed as it is now. These are the
tokens up to and including the first one that changed. For example, draft tokens a b c d were fed and a b X Y drawn:
a, b and X are exact, since X was predicted from a b. The cache keeps the keys and values of a and b. X is fed again,
because the cache was written with c at its position. Y was predicted from c, so it remains a draft token.

Lossless decoding makes exact tokens final, and no others. `GumbelAcceptance` then gives the autoregressive tokens, and
`ResidualAcceptance` their distribution. Decoding in rounds also makes a token final that has had its rounds, unless
refresh has just redrawn it or its probability under the backbone is below a threshold.

Three positions per picture keep count, `committed <= settled <= drafted`: tokens before `committed` are in the cache,
those before `settled` are final, those from there to `drafted` are draft tokens. With `rounds`, a draft token can be
*frozen*: it will not change, but is not settled while a token before it may.
"""

from dataclasses import dataclass

import torch

from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import RollingMemory, RollingWindow


@dataclass(frozen=True)
class RoundResult:
    """The outcome of a verification round; a column is a position of the window.

    Args:
        is_open: `bool (batch, width)`: draft tokens that the round has redrawn.
        num_rounds: `int64 (batch, width)`: verification rounds that each has had, this one included.
        first_change: `int64 (batch, 1)`: the first column whose token changed; the width if none did.
        needs_round: `bool (batch, width)`: tokens that need another round in any case; `None` for none.
    """

    is_open: torch.Tensor
    num_rounds: torch.Tensor
    first_change: torch.Tensor
    needs_round: torch.Tensor | None = None


@dataclass(frozen=True)
class FinalityRule:
    """When a draft token is final.

    Args:
        first_row_rounds, rounds: verification rounds after which a draft token of the first row, or of another one, is
            final; `None`: only exact tokens are.
        adaptive: whether exact tokens are final before they have had their rounds. Without `rounds` they always are.
        confidence_threshold: a token of lower probability under the backbone is not final before it is exact.
    """

    first_row_rounds: int | None = None
    rounds: int | None = None
    adaptive: bool = True
    confidence_threshold: float | None = None

    @property
    def exact_only(self) -> bool:
        return self.rounds is None

    def rounds_needed(self, row: int) -> int | None:
        """Rounds after which a draft token of a row is final; `None` if rounds alone do not make it final."""
        return self.first_row_rounds if row == 0 else self.rounds

    def may_change(self, window: RollingWindow, memory: RollingMemory, is_draft: torch.Tensor) -> torch.Tensor:
        """Of the draft tokens `bool (batch, width)`, those that a round may change."""
        return is_draft if self.exact_only else is_draft & ~window.read(memory.frozen)

    def settle(self, state: DecodingState, window: RollingWindow, done: RoundResult) -> None:
        """Move `state.settled` past the tokens that are final now, and `state.committed` past those to be cached."""
        memory, is_open = RollingMemory.of(state), done.is_open
        column = torch.arange(window.width, device=is_open.device)
        if not self.exact_only:
            enough = is_open & (done.num_rounds >= self._rounds_needed(state, window.positions))
            if done.needs_round is not None:
                enough &= ~done.needs_round | (column <= done.first_change)  # another round can't improve exact tokens
            window.write(memory.frozen, enough | window.read(memory.frozen))
            is_open = is_open & ~enough
        if self.adaptive:
            is_open = is_open & (column > done.first_change)
        # Everything before the first column that is still open is final.
        final_columns = torch.where(is_open, column, window.width).amin(1)
        # The host waits here, once a pass: it has to know where the next window lies.
        counts = torch.minimum(torch.stack([done.first_change[:, 0], final_columns]).cpu(), window.lengths)
        memory.all_accepted = (counts == window.lengths).all(0).tolist()
        # Both from `state.committed` on: how many tokens are as they were fed, and how many are final.
        as_fed, final = counts + window.num_leading_final
        active = state.settled < state.grid.length
        state.settled = torch.where(active, state.committed + final, state.settled)
        state.committed = torch.where(active, state.committed + torch.minimum(as_fed, final), state.committed)

    def settle_drafts(self, state: DecodingState, drafted_before: torch.Tensor) -> None:
        """Settle those of the new draft tokens that need no round.

        After a round that changed nothing, the first new cell was drawn from the backbone's prediction, not a head's,
        and that prediction was made from final tokens: the cell is exact. With 0 rounds, every draft token is final.

        Args:
            drafted_before: `int64 (batch,)` on the CPU: the new draft tokens are those from here on.
        """
        grid = state.grid
        follows = (state.settled == drafted_before) & (state.drafted > drafted_before)
        if self.adaptive:
            exact = follows & torch.tensor(RollingMemory.of(state).all_accepted)
            next_cell = state.settled + 1
            # The row-end token that the grid puts after the last code of a row is final with that code.
            next_cell = next_cell + (next_cell % grid.stride == grid.columns) * int(grid.row_end)
            state.settled = torch.where(exact, torch.minimum(next_cell, state.drafted), state.settled)
        if 0 in (self.first_row_rounds, self.rounds):
            unverified = torch.tensor([self.rounds_needed(at // grid.stride) == 0 for at in drafted_before.tolist()])
            state.settled = torch.where(follows & unverified, state.drafted, state.settled)

    def _rounds_needed(self, state: DecodingState, positions: torch.Tensor) -> torch.Tensor | int:
        first_row, others = self.first_row_rounds or 0, self.rounds or 0
        if first_row == others:
            return others
        return torch.where(positions < state.grid.stride, first_row, others)
