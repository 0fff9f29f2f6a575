"""Speculative Jacobi decoding: a window of draft tokens that corrects itself, without heads.

Sources: SJD, arXiv 2410.01699 (ICLR 2025): 2.22 to 2.31 times fewer passes on Lumina-mGPT, 2.32 on Emu3, 1.81 to 1.93
on Janus-Pro. SCD (also named MC-SJD), arXiv 2510.24211: draws of consecutive rounds are coupled; 4.21 times fewer on
Lumina-mGPT (568 passes) and 3.74 on Janus-Pro-7B (154), window 64. GSD (ICCV 2025): similar codes are accepted for one
another; 3.38 times fewer on Lumina-mGPT and 3.07 on Janus-Pro, no longer lossless. All figures are those of the
publications.
"""

from typing import Literal

from diffusers.configuration_utils import register_to_config

from ssd_pipelines.verifiers.acceptance import acceptance_rule
from ssd_pipelines.verifiers.base import check_choice, check_count
from ssd_pipelines.verifiers.drafter import Drafter
from ssd_pipelines.verifiers.finality import FinalityRule
from ssd_pipelines.verifiers.lookahead import LookaheadWindow
from ssd_pipelines.verifiers.rolling import Parts, RollingVerifier


class JacobiVerifier(RollingVerifier):
    """Feeds a window of `window` positions and resamples all of it in every pass, until its first tokens are exact.

    Args:
        window: positions that a pass feeds (SJD: 16, SCD: 64).
        coupling: how a resampled token is correlated with the one it replaces. "independent" is SJD: accepted up to
            the first rejection, every token after it drawn afresh. "residual" keeps each token with probability
            `min(1, p/q)`, the maximal coupling of SCD. "gumbel" is its shared noise, and draws the autoregressive
            picture of the same seed. All three are lossless.
        initial: the draft tokens at the end of the window: "random" codes, or copies of the code to the "left" or
            "above".
        num_neighbors: relaxed acceptance as in GSD: a code is accepted with the probability of itself and of that many
            codes with the nearest embeddings, in both distributions. 0 is lossless; only with "independent" and
            "residual".
        temperature, top_k, top_p: sampling settings; `None` takes the backbone's recommended ones.

    Raises:
        ValueError: for a value outside its range, or settings that exclude each other.
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

    def parts(self) -> Parts:
        c = self.config
        return Parts(
            acceptance=acceptance_rule(c.coupling, c.num_neighbors),
            finality=FinalityRule(),
            lookahead=LookaheadWindow(c.window),
            drafter=Drafter(c.initial, c.coupling),
        )
