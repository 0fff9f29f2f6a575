"""What one call's decoding knows, split by where it comes from: the call, its passes, and its generators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import torch

from ssd_pipelines.grid import Cells, Direction, TokenGrid, Window
from ssd_pipelines.pipeline_output import DecodingStats, PhaseClock
from ssd_pipelines.sampling import (
    CoupledNoise,
    Generators,
    SamplingSettings,
    draw_coupled,
    draw_seeds,
    draw_uniforms,
    sample,
    shape,
)


Coupling = Literal["residual", "gumbel"]
"""How a draft token and its resampled successor are correlated: by acceptance and residual, or by shared Gumbel noise.
"""


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


class HiddenStates:
    """The latest pre-norm state that predicts each position: from a pass, or from a head until a pass has fed it.

    With guidance there are two branches, the conditional one first, so `2 * batch` rows; without there are `batch`.

    Args:
        batch_size: number of pictures.
        length: sequence positions of a picture.
    """

    def __init__(self, batch_size: int, length: int) -> None:
        self._batch_size, self._length = batch_size, length
        self._buffer: torch.Tensor | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """`(batch or 2 * batch, length + 1, hidden_size)`; made by the first pass.

        Raises:
            RuntimeError: before the first pass.
        """
        if self._buffer is None:
            raise RuntimeError("No pass was made yet, so there are no hidden states.")
        return self._buffer

    def receive(self, window: Window, hidden: torch.Tensor) -> None:
        """Keep the states of a pass, each at the position that it predicts, in place of earlier ones.

        Args:
            window: what the pass fed.
            hidden: pre-norm states `(batch or 2 * batch, n, hidden_size)`. After the prompt's pass they begin with the
                one that predicts position 0, else with the one that predicts the window's second position.
        """
        if self._buffer is None:
            # One state for every position takes as much memory as a few rows of keys and values.
            self._buffer = hidden.new_zeros((hidden.shape[0], self._length + 1, hidden.shape[2]))
        if isinstance(window, Cells):
            pictures = torch.arange(self._batch_size, device=hidden.device)
            self._buffer[self._index(pictures, window.positions + 1)] = hidden
        else:
            self._buffer[:, window.stop + 1 - hidden.shape[1] : window.stop + 1] = hidden

    def between(self, start: int, stop: int) -> torch.Tensor:
        """States that predict positions `start` to `stop` of all pictures, `(batch or 2 * batch, n, hidden_size)`."""
        return self.buffer[:, start:stop]

    def at(self, pictures: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States of some pictures `(n,)` at positions `int64 (n, ...)`: `(n or 2 n, ..., hidden_size)`."""
        return self.buffer[self._index(pictures, positions)]

    def predict(
        self, pictures: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, where: torch.Tensor | None = None
    ) -> None:
        """Use states that heads predicted, `(n or 2 n, k, hidden_size)`, until a pass brings the backbone's.

        Args:
            pictures, positions: `(n,)` and `int64 (n, k)`.
            where: `bool (n, k)`: at which positions; all by default.
        """
        index = self._index(pictures, positions)
        if where is not None:
            both = where if len(index[0]) == len(where) else torch.cat([where, where])
            hidden = torch.where(both[..., None], hidden, self.buffer[index])
        self.buffer[index] = hidden

    def _index(self, pictures: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of positions `(n, ...)` in the buffer, in both branches if there are two."""
        if len(self.buffer) > self._batch_size:
            pictures = torch.cat([pictures, pictures + self._batch_size])
            positions = torch.cat([positions, positions])
        return pictures.view(-1, *[1] * (positions.ndim - 1)), positions


class Randomness:
    """All random numbers of a call, each picture's from its own generator.

    Args:
        generators: one per picture, one for all, or none (torch's default generator).
        batch_size: number of pictures.
        stride: sequence positions of a row.
        device: where the numbers are needed.
    """

    def __init__(self, generators: Generators, batch_size: int, stride: int, device: torch.device) -> None:
        self._generators, self._batch_size, self._stride, self._device = generators, batch_size, stride, device
        self._noise: CoupledNoise | None = None

    def uniforms(self, *shape: int) -> torch.Tensor:
        """`float32 (batch, *shape)` in [0, 1)."""
        return draw_uniforms(shape, self._batch_size, self._generators, self._device)

    def ragged_uniforms(self, count: int, starts: Sequence[int], stops: Sequence[int]) -> torch.Tensor:
        """`float32 (count, batch, max(stops))` in [0, 1); picture b draws those from `starts[b]` to `stops[b]` only.

        A picture of a batch then draws as many numbers as it would alone. The rest are 0.
        """
        drawn = torch.zeros(count, self._batch_size, max(stops), device=self._device)
        for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            generator = self._generators[b] if isinstance(self._generators, Sequence) else self._generators
            if stop > start:
                drawn[:, b, start:stop] = draw_uniforms((count, stop - start), 1, generator, self._device)[0]
        return drawn

    def noise(self, vocabulary: int) -> CoupledNoise:
        """This call's Gumbel noise; its seeds are drawn from the generators when it is first asked for."""
        if self._noise is None:
            seeds = draw_seeds(self._batch_size, self._generators)
            self._noise = CoupledNoise(seeds, self._stride, vocabulary, self._device)
        return self._noise

    def forget_noise(self, before: int) -> None:
        """Free the noise of rows that end before a position; nothing is drawn there any more."""
        if self._noise is not None:
            self._noise.forget(before)


class Memory:
    """Base of what a verifier remembers between its steps; each algorithm has its own."""

    @classmethod
    def of(cls, state: "DecodingState") -> Self:
        """The memory of a call, of this class.

        Raises:
            TypeError: if another verifier, or none yet, has decoded with this state.
        """
        if not isinstance(state.memory, cls):
            raise TypeError(f"This call's memory is {type(state.memory).__name__}, not {cls.__name__}.")
        return state.memory


@dataclass
class DecodingState:
    """What a call knows, and how far each picture has come.

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
        drafted: positions before this one hold at least a draft token.
        passes: passes made.
        hidden: the hidden states that passes and heads brought.
        random: where random numbers come from.
        memory: what the verifier remembers between its steps.
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
    hidden: HiddenStates = field(init=False)
    random: Randomness = field(init=False)
    memory: Memory | None = None

    def __post_init__(self) -> None:
        self.committed = self.everywhere(0)
        self.settled = self.drafted = self.everywhere(self.start_row * self.grid.stride)
        self.hidden = HiddenStates(self.batch_size, self.grid.length)
        self.random = Randomness(self.generators, self.batch_size, self.grid.stride, self.sequence.device)

    @property
    def batch_size(self) -> int:
        return self.sequence.shape[0]

    def everywhere(self, position: int) -> torch.Tensor:
        """The same position for every picture, `int64 (batch,)` on the CPU."""
        return torch.full((self.batch_size,), position, dtype=torch.long)

    def tokens(self, window: Window) -> torch.Tensor:
        """The sequence tokens of a window, `int64 (batch, n)`."""
        if isinstance(window, Cells):
            return self.sequence.gather(1, window.positions)
        return self.sequence[:, window.start : window.stop]

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Guided logits `float32 (batch, stop - start, vocabulary)`; computed only when a verifier asks for them."""
        return self.head(self.hidden.between(start, stop))

    def draw(self, start: int, stop: int, coupling: Coupling = "residual") -> None:
        """Draw positions from the backbone's own distribution, with fresh uniforms or with the Gumbel noise."""
        logits = self.logits(start, stop)
        if coupling == "gumbel":
            noise = self.random.noise(logits.shape[-1])
            noise.forget(start)
            self.sequence[:, start:stop] = draw_coupled(logits, noise.between(start, stop), self.sampling)
        else:
            chances = shape(logits, self.sampling)
            self.sequence[:, start:stop] = sample(chances, self.random.uniforms(stop - start))

    def rows_completed(self) -> int:
        """Whole rows that are final in every picture."""
        return (int(self.settled.min()) + int(self.grid.row_end)) // self.grid.stride
