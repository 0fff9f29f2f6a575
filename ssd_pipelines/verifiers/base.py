"""The contract between the decode loop and a decoding algorithm.

A verifier is to this pipeline what a scheduler is to a diffusion pipeline: it says which positions the next pass
feeds, and what becomes of the predictions. (In vLLM, "verifier" means the target model. Ours is not a model.) It keeps
nothing of a call on itself: all of that is in a `DecodingState`, so one verifier serves several calls at once.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import ConfigMixin, SchedulerMixin

from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import Direction, SpatialDraftHeads
from ssd_pipelines.pipeline_output import DecodingStats, PhaseClock
from ssd_pipelines.sampling import Generators, SamplingSettings, draw_uniforms, sample, shape


@dataclass(frozen=True)
class Predictions:
    """What is known about the tokens at `start` and after, from the pass before and the pass just made.

    Args:
        start: sequence position that `hidden[:, 0]` predicts.
        hidden: pre-norm states `(batch or 2 * batch, n, hidden_size)`; entry i predicts position `start + i`.
        head: turns states into guided float32 logits `(batch, n, vocabulary)`.
    """

    start: int
    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]

    @property
    def stop(self) -> int:
        return self.start + self.hidden.shape[1]

    def states(self, start: int, stop: int) -> torch.Tensor:
        """The states that predict positions `start` to `stop`, `(batch or 2 * batch, stop - start, hidden_size)`."""
        return self.hidden[:, start - self.start : stop - self.start]

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Guided logits of positions `start` to `stop`; computed only when a verifier asks for them."""
        return self.head(self.states(start, stop))

    def extended(self, window_start: int, hidden: torch.Tensor, history: int) -> "Predictions":
        """These predictions followed by those of a pass that fed positions from `window_start` on.

        The state that predicts `window_start` itself came from an earlier pass; it and `history` states before it are
        carried over, all that the pass made anew is replaced.
        """
        start = max(self.start, window_start - history)
        return Predictions(start, torch.cat([self.states(start, window_start + 1), hidden], dim=1), self.head)


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
        stats, clock: where verifiers account for what they do.
        start_row: rows that were given and are not drawn.

    Attributes:
        committed: positions before this one are final, and their keys and values are in the cache.
        settled: positions before this one are final, whether fed yet or not.
        drafted: positions before this one hold at least a draft.
        predictions: of the latest pass; reaches back far enough to draft from the last committed row.
        passes: passes made.
        proposal: `float32 (batch, n, vocabulary)`: what the drafts at `proposal_start` and after were last drawn from.
        corrected: `bool (batch, grid.length)`: which tokens the latest pass changed.
    """

    grid: TokenGrid
    sequence: torch.Tensor
    sampling: SamplingSettings
    generators: Generators
    heads: SpatialDraftHeads | None
    embed: Callable[[torch.Tensor], torch.Tensor]
    stats: DecodingStats
    clock: PhaseClock
    start_row: int = 0
    committed: int = 0
    settled: int = field(init=False)
    drafted: int = field(init=False)
    passes: int = 0
    predictions: Predictions = field(init=False)
    proposal: torch.Tensor = field(init=False)
    proposal_start: int = field(init=False)
    corrected: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.settled = self.drafted = self.start_row * self.grid.stride
        self.corrected = torch.zeros_like(self.sequence, dtype=torch.bool)

    @property
    def batch_size(self) -> int:
        return self.sequence.shape[0]

    def uniforms(self, *shape: int) -> torch.Tensor:
        """Uniform numbers `(batch, *shape)`, each picture's from its own generator."""
        return draw_uniforms(shape, self.batch_size, self.generators, self.sequence.device)

    def distribution(self, start: int, stop: int) -> torch.Tensor:
        """The backbone's shaped distribution at positions `start` to `stop`, `(batch, stop - start, vocabulary)`."""
        return shape(self.predictions.logits(start, stop), self.sampling)

    def draw(self, start: int, stop: int) -> None:
        """Draw positions from the backbone's own distribution."""
        self.sequence[:, start:stop] = sample(self.distribution(start, stop), self.uniforms(stop - start))

    def draft_states(self, direction: Direction, start: int, stop: int, num_offsets: int) -> torch.Tensor:
        """States that the heads predict from source positions `start` to `stop`: `(batch', offsets, n, hidden)`."""
        if self.heads is None:
            raise ValueError("Drafting needs draft heads, and this call has none.")
        hidden = self.predictions.states(start, stop)
        return self.heads(hidden, self.embed(self.sequence[:, start:stop]), direction, num_offsets)

    def rows_completed(self) -> int:
        """Whole rows that are final."""
        return (self.settled + int(self.grid.row_end)) // self.grid.stride


class Verifier(SchedulerMixin, ConfigMixin):
    """Base of all decoding algorithms. Saved as `verifier_config.json`; swapped with `from_config`:

        >>> pipe.verifier = AutoregressiveVerifier.from_config(pipe.verifier.config)

    A subclass plans its passes in `next_window` and acts on their predictions in `step`. `temperature`, `top_k` and
    `top_p` belong to every verifier's config; `None` leaves them to the backbone's recipe.
    """

    config_name = "verifier_config.json"
    needs_heads = False

    def history(self, grid: TokenGrid) -> int:
        """How many committed positions back `state.predictions` has to reach."""
        return 0

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
        own = {key: value for key, value in dict(config or {}).items() if key in known}
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

    def check(self, grid: TokenGrid, heads: SpatialDraftHeads | None) -> None:
        """Refuse, before any pass, what this verifier can't decode with.

        Raises:
            ValueError: in one sentence.
        """

    @abstractmethod
    def next_window(self, state: DecodingState) -> tuple[int, int] | None:
        """Sequence positions `[start, stop)` that the next pass feeds; `None` when the picture is done.

        All begin at `state.committed`. The first is fed behind the prompt, in the same pass: it holds the rows that
        were given, so usually none.
        """

    @abstractmethod
    def step(self, state: DecodingState) -> None:
        """Act on `state.predictions`: correct, commit (by moving `state.committed`), and draft what comes next."""

    @abstractmethod
    def passes_left(self, state: DecodingState) -> int:
        """How many more passes at most."""
