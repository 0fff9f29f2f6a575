"""Speculative Jacobi decoding: no heads, a window of guesses that corrects itself.

Sources: SJD, arXiv 2410.01699 (ICLR 2025): 2.22 to 2.31 times fewer passes on Lumina-mGPT, 2.32 on Emu3, 1.81 to 1.93
on Janus-Pro. MC-SJD, arXiv 2510.24211: draws of consecutive rounds are coupled; 4.21 times on Lumina-mGPT (568 passes)
and 3.74 on Janus-Pro-7B (154), window 64. GSD (ICCV 2025): similar codes are accepted for one another; 3.38 times on
Lumina-mGPT and 3.07 on Janus-Pro, no longer lossless. All figures are the publications'; ours are measured.
"""

from typing import Literal

import torch
from diffusers.configuration_utils import register_to_config

from ssd_pipelines.sampling import sample
from ssd_pipelines.verifiers.base import DecodingState, check_choice, check_count
from ssd_pipelines.verifiers.filling import fill_window
from ssd_pipelines.verifiers.rolling import Open, RollingVerifier


class JacobiVerifier(RollingVerifier):
    """Feeds a window of `window` positions and redraws all of it in every pass, until a prefix stands still.

    Args:
        window: positions that a pass feeds (SJD: 16, MC-SJD: 64).
        coupling: how a redrawn token hangs together with the one before. "independent" is SJD: accepted up to the
            first rejection, everything behind it drawn afresh. "residual" keeps each token with probability
            `min(1, p/q)`, the maximal coupling of MC-SJD; "gumbel" is its shared noise, and draws the autoregressive
            picture of the same seed. All three are lossless.
        initial: what fills the end of the window: "random" codes, or a repetition of the code to the "left" or "above".
        num_neighbors: relaxed acceptance as in GSD: a code is accepted with the probability of its group, itself and
            so many codes of the nearest embeddings, in both distributions. 0 is lossless; only with "independent" and
            "residual".
        temperature, top_k, top_p: sampling settings; `None` takes the backbone's recommended ones.
    """

    foreign_values = ()

    @register_to_config
    def __init__(
        self,
        window: int = 16,
        coupling: Literal["independent", "residual", "gumbel"] = "independent",
        initial: Literal["random", "left", "above"] = "above",
        num_neighbors: int = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        check_count("window", window, 1)
        check_choice("coupling", coupling, ("independent", "residual", "gumbel"))
        check_choice("initial", initial, ("random", "left", "above"))
        check_count("num_neighbors", num_neighbors, 0)
        if num_neighbors and coupling == "gumbel":
            raise ValueError('`num_neighbors` relaxes acceptance, which `coupling="gumbel"` has none of: set it to 0.')

    @property
    def num_neighbors(self) -> int:
        return self.config.num_neighbors

    def extend(self, state: DecodingState) -> None:
        self.fill_to(state, self.config.window, self._fill)

    def _fill(self, state: DecodingState, ends: torch.Tensor) -> None:
        fill_window(state, ends, self.config.initial, self.config.coupling)

    def _accept(
        self, state: DecodingState, window: Open, fed: torch.Tensor, p: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, accepted = super()._accept(state, window, fed, p)
        if self.config.coupling == "independent":
            # Behind the first rejection everything is drawn afresh, what would have been accepted too.
            positions = window.positions
            is_open = positions >= state.settled.to(fed.device)[:, None]
            rejected = is_open & (positions % state.grid.stride < state.grid.columns) & ~accepted
            behind = rejected.cumsum(1) - rejected.long() > 0
            starts, stops = self._open_columns(state, window)
            fresh = sample(p, state.ragged_uniforms(1, starts, stops)[0])
            tokens = torch.where(behind, fresh, tokens)
        return tokens, accepted
