"""The rolling window: every pass verifies all draft tokens, and the window moves on as far as they are final.

A pass feeds, for each picture, the tokens that are final but not in the cache yet, and after them all draft tokens. One
step then does four things, each by a part that has its own file:

1. `acceptance`: resample every draft token at its own position, all at the same time.
2. `finality`: find out which tokens are final now, and up to where the cache holds final tokens.
3. `lookahead` and `drafter`: decide how far to draft, and fill those cells with draft tokens.
4. `refresh`: resample the tokens whose prediction is stale from the draft heads, before the next pass.

Jacobi decoding has parts 1 to 3 and drafts without heads. Spatially speculative decoding drafts with heads.

Sources: Jacobi decoding with a probabilistic criterion, arXiv 2410.01699; shared noise and maximal coupling between
rounds, arXiv 2510.24211; draft tokens from spatial heads, arXiv 2606.20543. Merged commits and refresh are ours.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from ssd_pipelines.grid import Span, Window
from ssd_pipelines.sampling import shape
from ssd_pipelines.verifiers.acceptance import AcceptanceRule, Resampled
from ssd_pipelines.verifiers.base import Verifier
from ssd_pipelines.verifiers.drafter import Drafter
from ssd_pipelines.verifiers.finality import FinalityRule, Round
from ssd_pipelines.verifiers.lookahead import Lookahead
from ssd_pipelines.verifiers.refresh import Refresh
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import OpenWindow, RollingMemory


@dataclass(frozen=True)
class Parts:
    """What a rolling verifier is made of.

    Args:
        acceptance: resamples the draft tokens of a window.
        finality: says which of them are final.
        lookahead: says how far to draft.
        drafter: fills cells with draft tokens.
        refresh: resamples stale tokens from the draft heads; `None` for never.
        along_rows: for statistics: every draft token was drafted along its row, none from the row above.
    """

    acceptance: AcceptanceRule
    finality: FinalityRule
    lookahead: Lookahead
    drafter: Drafter
    refresh: Refresh | None = None
    along_rows: bool = False


class RollingVerifier(Verifier):
    """Base of all decoders with a rolling window."""

    @abstractmethod
    def parts(self) -> Parts:
        """The parts that this verifier's config describes."""

    def next_window(self, state: DecodingState) -> Window | None:
        if int(state.settled.min()) == state.grid.length:
            return None
        if state.passes == 0:
            return Span(0, int(state.settled[0]))
        window = RollingMemory.of(state).window = OpenWindow(state)
        return window.fed()

    def step(self, state: DecodingState) -> None:
        parts = self.parts()
        if state.passes == 0:
            state.committed = state.settled
            state.memory = RollingMemory.begin(state)
        else:
            with state.clock.phase("correction"):
                _verify(state, parts)
        state.random.forget_noise(int(state.committed.min()))
        with state.clock.phase("drafting"):
            before = state.drafted
            parts.drafter.fill(state, parts.lookahead.ends(state))
            parts.finality.settle_drafts(state, before)
            if parts.refresh is not None:
                parts.refresh.after_drafting(state, before)

    def passes_left(self, state: DecodingState) -> int:
        return state.grid.length - int(state.settled.min())


def _verify(state: DecodingState, parts: Parts) -> None:
    """A verification round: resample all draft tokens of the window that was fed, and settle those that are final."""
    memory = RollingMemory.of(state)
    window = memory.window
    assert window is not None, "a round follows a window"
    if window.width == 0:
        # Every token that was fed is final: a decoder with 0 rounds verifies nothing.
        state.committed = state.settled
        memory.stale.zero_()
        return
    drafts = window.read(state.sequence)
    is_open = parts.finality.still_open(window, memory, window.not_final(state))
    logits = state.head(window.hidden(state))
    resampled = parts.acceptance.resample(state, window, drafts, logits)
    tokens = window.spread(torch.where(is_open, resampled.tokens, drafts))
    changed = tokens != drafts
    rounds, offset = window.read(memory.rounds).add_(is_open), window.read(memory.offset)
    group = state.grid.length if parts.along_rows else state.grid.stride
    state.stats.record_round(resampled.accepted, is_open, window.positions, offset, rounds, group)

    column = torch.arange(window.width, device=tokens.device)
    first_change = torch.where(changed, column, window.width).amin(1)[:, None]
    window.write(state.sequence, tokens)
    undecided = _unlikely(state, parts.finality.confidence_threshold, tokens, logits, resampled)
    if parts.refresh is not None:
        refreshed = parts.refresh.in_round(state, window, changed, is_open & (column > first_change))
        if refreshed is not None:
            # A token from a draft head is never final before the backbone has verified it.
            undecided = refreshed if undecided is None else undecided | refreshed
    window.write(memory.rounds, rounds)
    parts.finality.settle(state, window, Round(is_open, rounds, first_change, undecided))


def _unlikely(
    state: DecodingState,
    threshold: float | None,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    resampled: Resampled,
) -> torch.Tensor | None:
    """`bool (batch, width)`: tokens whose probability under the backbone is below a threshold; `None` without one."""
    if threshold is None:
        return None
    p = shape(logits, state.sampling) if resampled.p is None else resampled.p
    return p.gather(-1, tokens.clamp_min(0)[..., None]).squeeze(-1) < threshold
