"""The acceptance rule: how a round resamples the draft tokens of a window, every position by itself.

Sources: shared Gumbel noise and maximal coupling between rounds, SCD, arXiv 2510.24211; acceptance with a residual,
arXiv 2211.17192; resampling everything after the first rejection, SJD, arXiv 2410.01699; acceptance by groups of
similar codes, LANTERN, arXiv 2410.03355, and GSD (ICCV 2025).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ssd_pipelines.sampling import accept_or_resample, draw_coupled, nearest_codes, sample, shape
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import RollingMemory, RollingWindow


@dataclass(frozen=True)
class Resampled:
    """The outcome of a round.

    Args:
        tokens: `int64 (batch, width)`, meaningful at draft tokens only.
        accepted: `bool (batch, width)`: which draft tokens were kept.
        p: `float32 (batch, width, vocabulary)`, the backbone's distribution, if the rule has computed it.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    p: torch.Tensor | None = None


class AcceptanceRule(ABC):
    """Resamples draft tokens from the backbone's predictions."""

    @abstractmethod
    def resample(
        self, state: DecodingState, window: RollingWindow, drafts: torch.Tensor, logits: torch.Tensor
    ) -> Resampled:
        """Resample a whole window.

        Args:
            drafts: `int64 (batch, width)`, the tokens that were fed.
            logits: `float32 (batch, width, vocabulary)`, guided but not filtered.
        """


@dataclass(frozen=True)
class GumbelAcceptance(AcceptanceRule):
    """Draw with the noise that belongs to the position; a draft token is kept if the same code comes out.

    The result is a function of the tokens before it. So a token whose predecessors are final is the one that
    autoregressive decoding with the same seed draws.
    """

    def resample(
        self, state: DecodingState, window: RollingWindow, drafts: torch.Tensor, logits: torch.Tensor
    ) -> Resampled:
        tokens = draw_coupled(logits, window.noise(state, logits.shape[-1]), state.sampling)
        return Resampled(tokens, tokens == drafts)


@dataclass(frozen=True)
class ResidualAcceptance(AcceptanceRule):
    """Keep a draft token with probability `min(1, p / q)`, else draw from `max(0, p - q)`.

    Args:
        num_neighbors: accept a code with the probability of itself and of so many codes with the nearest embeddings;
            0 is exact.
    """

    num_neighbors: int = 0

    def resample(
        self, state: DecodingState, window: RollingWindow, drafts: torch.Tensor, logits: torch.Tensor
    ) -> Resampled:
        memory = RollingMemory.of(state)
        p = shape(logits, state.sampling)
        starts, lengths = (state.committed + window.num_leading_final).tolist(), window.lengths.tolist()
        q = memory.proposals.read(starts, lengths, like=p)
        uniforms = state.random.ragged_uniforms(2, *_draft_columns(state, window))
        near = self._nearest(state, memory, p.shape[-1]) if self.num_neighbors else None
        tokens, accepted = accept_or_resample(drafts.clamp_min(0), p, q, uniforms, near)
        # Kept or resampled, a token now follows p: that is what the next round has to compare with.
        memory.proposals.replace(starts, lengths, p)
        return Resampled(tokens, accepted, p)

    def _nearest(self, state: DecodingState, memory: RollingMemory, vocabulary: int) -> torch.Tensor:
        if memory.nearest is None:
            codes = torch.arange(vocabulary, device=state.sequence.device)
            memory.nearest = nearest_codes(state.embed(codes[None])[0], self.num_neighbors)
        return memory.nearest


@dataclass(frozen=True)
class IndependentAcceptance(ResidualAcceptance):
    """As `ResidualAcceptance` up to the first rejection; every token after it is drawn afresh (SJD)."""

    def resample(
        self, state: DecodingState, window: RollingWindow, drafts: torch.Tensor, logits: torch.Tensor
    ) -> Resampled:
        result = super().resample(state, window, drafts, logits)
        positions = window.positions
        is_draft = positions >= state.settled.to(positions.device)[:, None]
        rejected = is_draft & (positions % state.grid.stride < state.grid.columns) & ~result.accepted
        after = rejected.cumsum(1) - rejected.long() > 0
        assert result.p is not None
        fresh = sample(result.p, state.random.ragged_uniforms(1, *_draft_columns(state, window))[0])
        return Resampled(torch.where(after, fresh, result.tokens), result.accepted, result.p)


def acceptance_rule(coupling: str, num_neighbors: int = 0) -> AcceptanceRule:
    """The rule that belongs to a verifier's `coupling`: "gumbel", "residual" or "independent"."""
    if coupling == "gumbel":
        return GumbelAcceptance()
    return IndependentAcceptance(num_neighbors) if coupling == "independent" else ResidualAcceptance(num_neighbors)


def _draft_columns(state: DecodingState, window: RollingWindow) -> tuple[list[int], list[int]]:
    """By picture, the column of the first draft token, and how many columns there are."""
    return (state.settled - state.committed - window.num_leading_final).clamp_min(0).tolist(), window.lengths.tolist()
