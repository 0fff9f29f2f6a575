"""Autoregressive decoding: one token a pass. The reference that everything else is compared with."""

from diffusers.configuration_utils import register_to_config

from ssd_pipelines.verifiers.base import DecodingState, Verifier


class AutoregressiveVerifier(Verifier):
    """Feeds one position a pass and draws the next, as the libraries' own `generate` does.

    A picture takes `grid.length` passes: 576 for Janus-Pro, 2,352 for Lumina-mGPT at 768 pixels, 8,190 for Emu3 at
    720. Forced row ends take their pass like any token, as they do in the published counts.

    Args:
        temperature, top_k, top_p: sampling settings; `None` takes the backbone's recommended ones.
    """

    @register_to_config
    def __init__(self, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None) -> None:
        pass

    def next_window(self, state: DecodingState) -> tuple[int, int] | None:
        if state.settled == state.grid.length:
            return None
        return state.committed, state.settled  # in the first pass, behind the prompt, the rows that were given

    def step(self, state: DecodingState) -> None:
        state.committed = state.settled
        position = state.settled
        state.corrected.zero_()
        if position % state.grid.stride < state.grid.columns:  # a row end is forced: nothing to draw
            with state.clock.phase("correction"):
                state.draw(position, position + 1)
        state.settled = state.drafted = position + 1

    def passes_left(self, state: DecodingState) -> int:
        return state.grid.length - state.settled
