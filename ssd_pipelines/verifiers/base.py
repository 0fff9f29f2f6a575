"""The contract between the decode loop and a decoding algorithm.

A verifier is to this pipeline what a scheduler is to a diffusion pipeline: it says which positions the next pass feeds,
and acts on the predictions. (In vLLM, "verifier" means the target model. Ours is not a model.) It stores nothing of a
call on itself: that is in a `DecodingState`, so one verifier serves several calls at once.
"""

from abc import abstractmethod
from typing import Any, ClassVar

from diffusers import ConfigMixin, SchedulerMixin

from ssd_pipelines.grid import TokenGrid, Window
from ssd_pipelines.sampling import SamplingSettings
from ssd_pipelines.verifiers.state import DecodingState, DraftHeads


class Verifier(SchedulerMixin, ConfigMixin):
    """Base of all decoding algorithms. Saved as `verifier_config.json`; swapped with `from_config`:

        >>> pipe.verifier = AutoregressiveVerifier.from_config(pipe.verifier.config)

    A subclass plans its passes in `next_window` and acts on their predictions in `step`. `temperature`, `top_k` and
    `top_p` belong to every verifier's config; `None` leaves them to the backbone's recipe.
    """

    config_name = "verifier_config.json"
    needs_heads = False
    foreign_values: ClassVar[tuple[tuple[str, Any], ...]] = (("coupling", "independent"),)
    """Values that another verifier's setting of the same name can have and this one's can't."""

    @classmethod
    def from_pretrained(cls, *args: Any, variant: str | None = None, **kwargs: Any) -> Any:
        """As in `SchedulerMixin`; Modular Diffusers gives every component a `variant`, which settings don't have."""
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """This verifier with the settings of another one. Settings that only the other has are kept, but not used.

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
        # What the other leaves as None, or this one can't have, is this one's default.
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
        """Refuse, before any pass, a grid or heads that this verifier can't decode with.

        Args:
            grid: of the picture to be drawn.
            heads: the pipeline's draft heads, if it has any.

        Raises:
            ValueError: naming the setting, what it needs and what there is.
        """

    @abstractmethod
    def next_window(self, state: DecodingState) -> Window | None:
        """What the next pass feeds; `None` when all pictures are done.

        A `Span` begins at `state.committed`, the same for all pictures. The first window is a span that is fed after
        the prompt, in the same pass: it holds the rows that were given, so usually none.
        """

    @abstractmethod
    def step(self, state: DecodingState) -> None:
        """Act on the states of a pass: correct, commit (by moving `state.committed`), and draft what comes next."""

    @abstractmethod
    def passes_left(self, state: DecodingState) -> int:
        """How many passes are still to come, for the progress bar: an upper bound, except where refresh or
        `confidence_threshold` adds rounds to some tokens."""


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a setting that is none of `allowed`."""
    if value not in allowed:
        words = " or ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in allowed)
        raise ValueError(f"`{name}` must be {words}, got {value!r}.")


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse a setting that is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
