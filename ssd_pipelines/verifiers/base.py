"""The contract between the decode loop and a decoding algorithm.

A verifier is to this pipeline what a scheduler is to a diffusion pipeline: it says which positions the next pass
feeds, and what becomes of the predictions. (In vLLM, "verifier" means the target model. Ours is not a model.) It keeps
nothing of a call on itself: all of that is in a `DecodingState`, so one verifier serves several calls at once.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from diffusers import ConfigMixin, SchedulerMixin

from ssd_pipelines.grid import Cells, Direction, TokenGrid, Window
from ssd_pipelines.pipeline_output import DecodingStats, PhaseClock
from ssd_pipelines.sampling import (
    CoupledNoise,
    Generators,
    SamplingSettings,
    draw_coupled,
    draw_seeds,
    draw_uniforms,
    nearest_codes,
    sample,
    shape,
)


Coupling = Literal["residual", "gumbel"]
"""How the draws of a position hang together: by acceptance and residual, or by the same Gumbel noise."""


class DraftHeads(Protocol):
    """What verifiers need of draft heads; [`~ssd_pipelines.SpatialDraftHeads`] documents each of these."""

    config: Any
    horizontal: Any
    vertical: Any
    row: Any

    def __call__(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, direction: Direction, num_offsets: int
    ) -> torch.Tensor: ...

    def predict(self, head: Any, z: torch.Tensor) -> torch.Tensor: ...

    def predict_cells(self, above: torch.Tensor, left: torch.Tensor) -> torch.Tensor: ...

    def to_pre_norm(self, predicted: torch.Tensor) -> torch.Tensor: ...

    def source_features(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor: ...


@dataclass
class DecodingState:
    """Everything that one call's decoding knows.

    Args:
        grid: the picture's token grid.
        sequence: `int64 (batch, grid.length)`: codes, row ends, and `UNDRAWN` where there is nothing yet.
        sampling: how logits become distributions.
        generators: one per picture, one for all, or none (torch's default generator).
        heads: draft heads, for verifiers that draft.
        embed: sequence tokens `(batch, n)` to embeddings of the same batch as the hidden states.
        head: turns pre-norm states `(batch or 2 * batch, n, hidden_size)` into guided float32 logits
            `(batch, n, vocabulary)`.
        stats, clock: where verifiers account for what they do.
        start_row: rows that were given and are not drawn.

    Attributes:
        committed: `int64 (batch,)`, on the CPU like the two below: positions before this one are final, and their keys
            and values are in the cache.
        settled: positions before this one are final, whether fed yet or not.
        drafted: positions before this one hold at least a draft.
        passes: passes made.
        memory: whatever else a verifier has to remember between its steps.
    """

    grid: TokenGrid
    sequence: torch.Tensor
    sampling: SamplingSettings
    generators: Generators
    heads: DraftHeads | None
    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]
    stats: DecodingStats
    clock: PhaseClock
    start_row: int = 0
    committed: torch.Tensor = field(init=False)
    settled: torch.Tensor = field(init=False)
    drafted: torch.Tensor = field(init=False)
    passes: int = 0
    memory: Any = None
    _hidden: torch.Tensor | None = field(init=False, default=None)
    _noise: CoupledNoise | None = field(init=False, default=None)
    _near: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.committed = self.everywhere(0)
        self.settled = self.drafted = self.everywhere(self.start_row * self.grid.stride)

    @property
    def batch_size(self) -> int:
        return self.sequence.shape[0]

    def everywhere(self, position: int) -> torch.Tensor:
        """The same position for every picture, `int64 (batch,)` on the CPU."""
        return torch.full((self.batch_size,), position, dtype=torch.long)

    # --- what a pass fed and said -----------------------------------------------------------------------------------

    def tokens(self, window: Window) -> torch.Tensor:
        """The sequence tokens of a window, `int64 (batch, n)`."""
        if isinstance(window, Cells):
            return self.sequence.gather(1, window.positions)
        return self.sequence[:, window.start : window.stop]

    def receive(self, window: Window, hidden: torch.Tensor) -> None:
        """Keep the states of a pass, each at the position that it predicts, in place of earlier ones.

        Args:
            hidden: pre-norm states `(batch or 2 * batch, n, hidden_size)`. Behind the prompt they begin with the one
                that predicts position 0, else with the one after the window's first position.
        """
        if self._hidden is None:
            # One state for every position is what a few rows of keys and values take.
            self._hidden = hidden.new_zeros((hidden.shape[0], self.grid.length + 1, hidden.shape[2]))
        if isinstance(window, Cells):
            pictures = torch.arange(self.batch_size, device=hidden.device)
            self._hidden[self._places(pictures, window.positions + 1)] = hidden
        else:
            self._hidden[:, window.stop + 1 - hidden.shape[1] : window.stop + 1] = hidden

    def states(self, start: int, stop: int) -> torch.Tensor:
        """The latest states that predict positions `start` to `stop`, `(batch or 2 * batch, n, hidden_size)`."""
        return self._hidden_buffer[:, start:stop]

    def states_at(self, pictures: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same for some pictures `(n,)`, at positions `int64 (n, ...)` of each one's own."""
        return self._hidden_buffer[self._places(pictures, positions)]

    def foresee(
        self, pictures: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, where: torch.Tensor | None = None
    ) -> None:
        """Let states that the heads predict, `(n or 2 n, k, hidden_size)`, stand in until a pass brings true ones.

        Args:
            where: `bool (n, k)`: for which positions.
        """
        places = self._places(pictures, positions)
        if where is not None:
            both = where if len(places[0]) == len(where) else torch.cat([where, where])
            hidden = torch.where(both[..., None], hidden, self._hidden_buffer[places])
        self._hidden_buffer[places] = hidden

    @property
    def _hidden_buffer(self) -> torch.Tensor:
        assert self._hidden is not None, "no pass was made yet"
        return self._hidden

    def _places(self, pictures: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of the states of positions `(n, ...)`, in both branches if there are two."""
        if len(self._hidden_buffer) > self.batch_size:
            pictures = torch.cat([pictures, pictures + self.batch_size])
            positions = torch.cat([positions, positions])
        return pictures.view(-1, *[1] * (positions.ndim - 1)), positions

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Guided logits of positions `start` to `stop`; computed only when a verifier asks for them."""
        return self.head(self.states(start, stop))

    def distribution(self, start: int, stop: int) -> torch.Tensor:
        """The backbone's shaped distribution at positions `start` to `stop`, `(batch, stop - start, vocabulary)`."""
        return shape(self.logits(start, stop), self.sampling)

    # --- randomness -------------------------------------------------------------------------------------------------

    def uniforms(self, *shape: int) -> torch.Tensor:
        """Uniform numbers `(batch, *shape)`, each picture's from its own generator."""
        return draw_uniforms(shape, self.batch_size, self.generators, self.sequence.device)

    def ragged_uniforms(self, count: int, starts: list[int], stops: list[int]) -> torch.Tensor:
        """Uniform numbers `(count, batch, max(stops))`; picture b draws those from `starts[b]` to `stops[b]` only.

        So a picture that needs fewer than its neighbours draws as many as it would alone. The rest are 0.
        """
        drawn = torch.zeros(count, self.batch_size, max(stops), device=self.sequence.device)
        for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            generator = self.generators[b] if isinstance(self.generators, Sequence) else self.generators
            if stop > start:
                drawn[:, b, start:stop] = draw_uniforms((count, stop - start), 1, generator, drawn.device)[0]
        return drawn

    def noise(self, vocabulary: int) -> CoupledNoise:
        """This call's coupled noise; its seeds are drawn from the generators when it is first asked for."""
        if self._noise is None:
            seeds = draw_seeds(self.batch_size, self.generators)
            self._noise = CoupledNoise(seeds, self.grid.stride, vocabulary, self.sequence.device)
        return self._noise

    def nearest_codes(self, vocabulary: int, number: int) -> torch.Tensor:
        """Of every code, itself and the `number` codes nearest by embedding, `int64 (vocabulary, number + 1)`."""
        if self._near is None:
            codes = torch.arange(vocabulary, device=self.sequence.device)
            self._near = nearest_codes(self.embed(codes[None])[0], number)
        return self._near

    def draw(self, start: int, stop: int, coupling: Coupling = "residual") -> None:
        """Draw positions from the backbone's own distribution, with fresh randomness or with the coupled noise."""
        if coupling == "gumbel":
            logits = self.logits(start, stop)
            noise = self.noise(logits.shape[-1])
            noise.forget(start)
            self.sequence[:, start:stop] = draw_coupled(logits, noise.between(start, stop), self.sampling)
        else:
            self.sequence[:, start:stop] = sample(self.distribution(start, stop), self.uniforms(stop - start))

    # --- drafting ---------------------------------------------------------------------------------------------------

    def draft_states(self, direction: Direction, start: int, stop: int, num_offsets: int) -> torch.Tensor:
        """States that the heads predict from source positions `start` to `stop`: `(batch', offsets, n, hidden)`."""
        if self.heads is None:
            raise ValueError("Drafting needs draft heads, and this call has none.")
        hidden = self.states(start, stop)
        return self.heads(hidden, self.embed(self.sequence[:, start:stop]), direction, num_offsets)

    def rows_completed(self) -> int:
        """Whole rows that are final in every picture."""
        return (int(self.settled.min()) + int(self.grid.row_end)) // self.grid.stride


class Verifier(SchedulerMixin, ConfigMixin):
    """Base of all decoding algorithms. Saved as `verifier_config.json`; swapped with `from_config`:

        >>> pipe.verifier = AutoregressiveVerifier.from_config(pipe.verifier.config)

    A subclass plans its passes in `next_window` and acts on their predictions in `step`. `temperature`, `top_k` and
    `top_p` belong to every verifier's config; `None` leaves them to the backbone's recipe.
    """

    config_name = "verifier_config.json"
    needs_heads = False
    foreign_values: ClassVar[tuple[tuple[str, Any], ...]] = (("coupling", "independent"),)
    """Settings of other verifiers that share a name with one of this, but not their meaning."""

    @classmethod
    def from_pretrained(cls, *args: Any, variant: str | None = None, **kwargs: Any) -> Any:
        """As in `SchedulerMixin`; Modular Diffusers gives every component a `variant`, which settings don't have."""
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """This verifier with the settings of another; settings that only the other knows are carried along unused.

        Args:
            config: of any verifier, a `verifier_config.json` read with `load_config`, or a plain dict.
            kwargs: settings to change.

        Raises:
            ValueError: for a setting in `kwargs` that this verifier doesn't have.
        """
        known = cls._get_init_keys(cls)
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known - {'self'}))}."
            )
        foreign = {key: value for key, value in dict(config or {}).items() if key not in known and key[0] != "_"}
        # What another verifier leaves open, or this one has no notion of, is this one's default here.
        own = {
            key: value
            for key, value in dict(config or {}).items()
            if key in known and value is not None and (key, value) not in cls.foreign_values
        }
        loaded = super().from_config(own, return_unused_kwargs=return_unused_kwargs, **kwargs)
        (loaded[0] if return_unused_kwargs else loaded).register_to_config(**foreign)
        return loaded

    def sampling(self, recommended: SamplingSettings, **overrides: float | int | None) -> SamplingSettings:
        """The settings of a call: its own, else those of this config, else the backbone's recommended ones."""
        values: dict[str, Any] = {}
        for name in ("temperature", "top_k", "top_p"):
            candidates = (overrides.get(name), self.config.get(name), getattr(recommended, name))
            values[name] = next(value for value in candidates if value is not None)
        return SamplingSettings(**values)

    def check(self, grid: TokenGrid, heads: DraftHeads | None) -> None:
        """Refuse, before any pass, what this verifier can't decode with.

        Raises:
            ValueError: in one sentence.
        """

    @abstractmethod
    def next_window(self, state: DecodingState) -> Window | None:
        """What the next pass feeds; `None` when all pictures are done.

        A `Span` begins at `state.committed`, the same for all pictures. The first window is a span that is fed behind
        the prompt, in the same pass: it holds the rows that were given, so usually none.
        """

    @abstractmethod
    def step(self, state: DecodingState) -> None:
        """Act on the states of a pass: correct, commit (by moving `state.committed`), and draft what comes next."""

    @abstractmethod
    def passes_left(self, state: DecodingState) -> int:
        """How many more passes, for the progress bar: at most, unless tokens that refresh has redrawn, or that the
        backbone isn't sure of, take further ones."""


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a setting that is none of `allowed`."""
    if value not in allowed:
        words = " or ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in allowed)
        raise ValueError(f"`{name}` must be {words}, got {value!r}.")


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse a setting that is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
