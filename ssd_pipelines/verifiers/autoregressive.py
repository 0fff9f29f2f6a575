"""Autoregressive decoding: one token per pass. The reference for every other decoder."""

from diffusers.configuration_utils import register_to_config

from ssd_pipelines.grid import Span, Window
from ssd_pipelines.verifiers.base import Verifier, check_choice
from ssd_pipelines.verifiers.state import Coupling, DecodingState


class AutoregressiveVerifier(Verifier):
    """Feeds one position per pass and draws the next, as transformers' `generate` does.

    A picture takes `grid.length` passes: 576 for Janus-Pro, 2,352 for Lumina-mGPT at 768 pixels, 8,190 for Emu3 at
    720. A forced row end takes a pass like any token, as it does in the published counts.

    Args:
        coupling: "gumbel" draws position i as the argmax of logits plus a noise that depends on the picture's
            generator and on i alone, so that a speculative decoder with the same noise draws the same picture;
            "residual" takes a fresh uniform number per draw. Both follow the same distribution.
        temperature, top_k, top_p: sampling settings; `None` takes the backbone's recommended ones.
    """

    @register_to_config
    def __init__(
        self,
        coupling: Coupling = "gumbel",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        check_choice("coupling", coupling, ("residual", "gumbel"))

    def next_window(self, state: DecodingState) -> Window | None:
        settled = int(state.settled[0])
        # The first pass feeds the given rows after the prompt.
        return None if settled == state.grid.length else Span(int(state.committed[0]), settled)

    def step(self, state: DecodingState) -> None:
        state.committed = state.settled
        position = int(state.settled[0])
        if position % state.grid.stride < state.grid.columns:  # a row end is forced: nothing to draw
            with state.clock.phase("correction"):
                state.draw(position, position + 1, self.config.coupling)
        state.settled = state.drafted = state.everywhere(position + 1)

    def passes_left(self, state: DecodingState) -> int:
        return state.grid.length - int(state.settled[0])
