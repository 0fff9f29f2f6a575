"""The rolling window: every pass verifies all draft tokens, and the window moves on as far as they are final.

A pass feeds, for each picture, the tokens that are final but not in the cache yet, and after them all draft tokens. One
step then does four things, each by a part that has its own file:

1. `acceptance`: redraw every draft token from the backbone's prediction of its position, all at the same time. A draft
   token is rejected if another code comes out, or by an acceptance test.
2. `finality`: find out which tokens are final now, and up to where the cache holds final tokens.
3. `lookahead` and `drafter`: decide how far to draft, and fill those cells with draft tokens.
4. `refresh`: the draft heads redraw new draft tokens, and tokens whose left neighbour has changed since they were
   predicted. They remain draft tokens. (With `rounds`, the latter are redrawn right after 1.)

The default, `SpatialDraftVerifier()`, has `GumbelAcceptance`, `FinalityRule()`, `LookaheadWindow`, draft heads and
refresh. `GumbelAcceptance` redraws a token with the noise that autoregressive decoding uses at the same position. So a
token is the autoregressive one as soon as all tokens before it are.

Jacobi decoding has parts 1 to 3 and drafts without heads. Spatially speculative decoding drafts with heads.

The first pass reads the prompt and verifies nothing. Its last state predicts the first code. `hidden[p]` is the state
that predicts position p: it comes from feeding the token before it, so a window starts with at least one final token.
The loop in `pipeline.py` truncates the cache to `state.committed` after each step.

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
from ssd_pipelines.verifiers.finality import FinalityRule, RoundResult
from ssd_pipelines.verifiers.lookahead import Lookahead
from ssd_pipelines.verifiers.refresh import Refresh
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import RollingMemory, RollingWindow


@dataclass(frozen=True)
class Parts:
    """What a rolling verifier is made of.

    Args:
        acceptance: redraws the draft tokens of a window.
        finality: says which of them are final.
        lookahead: says how far to draft.
        drafter: fills cells with draft tokens.
        refresh: redraws new and stale draft tokens from the draft heads; `None` for never.
        along_rows: for statistics only: whether all draft tokens count as drafted along the row.
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
            return Span(0, int(state.settled[0]))  # the rows that were given, the same number in every picture
        window = RollingMemory.of(state).window = RollingWindow(state)
        return window.fed()

    def step(self, state: DecodingState) -> None:
        parts = self.parts()
        if state.passes == 0:
            state.committed = state.settled  # the prompt's pass has also cached the given rows
            state.memory = RollingMemory.begin(state)
        else:
            with state.clock.phase("correction"):
                _verify(state, parts)
        state.random.forget_noise(int(state.committed.min()))
        with state.clock.phase("drafting"):
            drafted_before = state.drafted
            parts.drafter.fill(state, parts.lookahead.ends(state))
            # What is drafted from the backbone's own state may be final without a round.
            parts.finality.settle_drafts(state, drafted_before)
            if parts.refresh is not None:
                parts.refresh.after_drafting(state, drafted_before)

    def passes_left(self, state: DecodingState) -> int:
        return state.grid.length - int(state.settled.min())


def _verify(state: DecodingState, parts: Parts) -> None:
    """A verification round: redraw all draft tokens of the window that was fed, and settle those that are final."""
    memory = RollingMemory.of(state)
    window = memory.window
    assert window is not None, "a round follows a window"
    if window.width == 0:
        # Every token that was fed is final, as with 0 rounds or a window of 1: there is nothing to verify.
        state.committed = state.settled
        memory.stale.zero_()
        return
    fed = window.read(state.sequence)
    is_open = parts.finality.may_change(window, memory, window.not_final(state))
    logits = state.head(window.hidden(state))
    resampled = parts.acceptance.resample(state, window, fed, logits)
    # Where a picture has fewer columns than others, those that repeat its last position get the same token.
    tokens = window.spread(torch.where(is_open, resampled.tokens, fed))
    changed = tokens != fed
    rounds, offset = window.read(memory.rounds).add_(is_open), window.read(memory.offset)
    group = state.grid.length if parts.along_rows else state.grid.stride
    state.stats.record_round(resampled.accepted, is_open, window.positions, offset, rounds, group)

    column = torch.arange(window.width, device=tokens.device)
    # Up to here, every token was predicted from tokens that have not changed.
    first_change = torch.where(changed, column, window.width).amin(1)[:, None]
    window.write(state.sequence, tokens)
    needs_round = _unlikely(state, parts.finality.confidence_threshold, tokens, logits, resampled)
    if parts.refresh is not None:
        refreshed = parts.refresh.in_round(state, window, changed, is_open & (column > first_change))
        if refreshed is not None:
            # With `rounds`, a token from a draft head is not final before the backbone has verified it.
            needs_round = refreshed if needs_round is None else needs_round | refreshed
    window.write(memory.rounds, rounds)
    parts.finality.settle(state, window, RoundResult(is_open, rounds, first_change, needs_round))


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
