"""The window of a rolling decoder: which positions a pass feeds, and what is remembered of the draft tokens in it."""

from dataclasses import dataclass, field

import torch

from ssd_pipelines.grid import Cells, Span, Window
from ssd_pipelines.verifiers.state import DecodingState, Memory


class RollingWindow:
    """The positions that a pass feeds, from the first one that is not in the cache to the last draft token.

    The first `num_leading_final` of them are final in every picture: they are fed for the cache, and their predictions
    are not needed. Everything else here is about the columns after them: column j of picture b is the position
    `committed[b] + num_leading_final + j`.

    Attributes:
        num_leading_final: how many leading positions are final in every picture.
        width: how many columns the picture with the most of them has.
        lengths: `int64 (batch,)` on the CPU: columns of each picture; 0 for a picture that is done.
        start, stop: the smallest position of all columns, and one more than the largest.
        is_span: whether all pictures have the same positions.
        positions: `int64 (batch, width)`; a picture with fewer columns than others repeats its last position.
        own: `bool (batch, width)`: which columns are not such repetitions; `None` if all are.
    """

    def __init__(self, state: DecodingState) -> None:
        device, end = state.sequence.device, state.grid.length
        committed, settled, drafted = (at.tolist() for at in (state.committed, state.settled, state.drafted))
        done = [at == end for at in settled]
        lengths = [0 if d else b - a for a, b, d in zip(committed, drafted, done, strict=True)]
        skip = min((s - a for a, s, d in zip(committed, settled, done, strict=True) if not d), default=0)
        longest = max(lengths)
        self.num_leading_final, self.width = skip, longest - skip
        self.lengths = torch.tensor([max(length - skip, 0) for length in lengths])
        self._start = min((a for a, d in zip(committed, done, strict=True) if not d), default=end)
        self.start, self.stop = self._start + skip, max(drafted)
        uniform = min(lengths) == longest
        self.is_span = uniform and min(committed) == max(committed)
        self.own = self._columns = None
        if self.is_span:
            self.positions = torch.arange(self.start, self.stop, device=device).expand(state.batch_size, -1)
            return
        j, fed = torch.arange(longest, device=device), torch.tensor(lengths, device=device)[:, None]
        columns = torch.minimum(j, (fed - 1).clamp_min(0))
        first = torch.tensor([end - 1 if d else a for a, d in zip(committed, done, strict=True)], device=device)
        self._fed = first[:, None] + columns
        self.positions = self._fed[:, skip:]
        if not uniform:
            self.own = (j < fed)[:, skip:]
            self._columns = (columns[:, skip:] - skip).clamp_min(0)

    def fed(self) -> Window:
        """What the pass feeds, its leading final positions included."""
        if self.is_span:
            return Span(self._start, self.stop)
        return Cells(self._fed, min(self._start, self.stop - 1), self.stop)

    def not_final(self, state: DecodingState) -> torch.Tensor:
        """`bool (batch, width)`: columns that hold a draft token; forced row ends and repetitions are none."""
        open_ = self.positions >= state.settled.to(self.positions.device)[:, None]
        if self.own is not None:
            open_ &= self.own
        if state.grid.row_end:
            open_ &= self.positions % state.grid.stride < state.grid.columns
        return open_

    def hidden(self, state: DecodingState) -> torch.Tensor:
        """States that predict the columns, `(batch or 2 * batch, width, hidden_size)`."""
        if self.is_span:
            return state.hidden.between(self.start, self.stop)
        return state.hidden.at(torch.arange(state.batch_size, device=self.positions.device), self.positions)

    def noise(self, state: DecodingState, vocabulary: int) -> torch.Tensor:
        """The call's Gumbel noise at the columns, `float32 (batch, width, vocabulary)`."""
        noise = state.random.noise(vocabulary)
        if self.is_span:
            return noise.between(self.start, self.stop)
        pictures = torch.arange(state.batch_size, device=self.positions.device)
        return noise.at(pictures, self.positions, int(state.committed.min()), self.stop)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of what `(batch, length)` holds at the columns, `(batch, width)`."""
        if self.is_span:
            return values[:, self.start : self.stop].clone()
        return values.gather(1, self.positions)

    def write(self, values: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put `(batch, width)` at the columns of `(batch, length)`, in place; returns the latter."""
        if self.is_span:
            values[:, self.start : self.stop] = new
            return values
        return values.scatter_(1, self.positions, self.spread(new))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Give repeated columns the value of the one they repeat, so that writing does not depend on the order."""
        return values if self._columns is None else values.gather(1, self._columns)


class Proposals:
    """With residual coupling: the distribution that each draft token was last drawn from.

    Args:
        starts: by picture, the first position that can have one.
    """

    def __init__(self, starts: list[int]) -> None:
        self._starts = starts
        self._rows: list[torch.Tensor] = []

    def add(
        self, pictures: torch.Tensor, positions: torch.Tensor, q: torch.Tensor, where: torch.Tensor | None = None
    ) -> None:
        """Remember distributions `(n, k, vocabulary)` of new draft tokens; forced row ends between them get zeros.

        Args:
            pictures: `(n,)`, indices within the batch.
            positions: `int64 (n, k)`, ascending.
            where: `bool (n, k)`: which of them were written; all by default.
        """
        if not self._rows:
            self._rows = [q.new_zeros((0, q.shape[-1])) for _ in self._starts]
        written = torch.ones_like(positions, dtype=torch.bool) if where is None else where
        for b, at, row, mask in zip(pictures.tolist(), positions, q, written, strict=True):
            known, begin = self._rows[b], self._starts[b]
            grown = known.new_zeros((max(len(known), int(at[-1]) + 1 - begin), known.shape[-1]))
            grown[: len(known)] = known
            grown[at[mask] - begin] = row[mask]
            self._rows[b] = grown

    def read(self, starts: list[int], lengths: list[int], like: torch.Tensor) -> torch.Tensor:
        """Distributions of `lengths[b]` positions from `starts[b]` on, in the shape of `like`; zeros elsewhere."""
        q = torch.zeros_like(like)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            shift = start - self._starts[b]
            known = self._rows[b][shift : shift + length]
            q[b, : len(known)] = known
        return q

    def replace(self, starts: list[int], lengths: list[int], p: torch.Tensor) -> None:
        """Tokens from `starts[b]` on now follow `p[b, : lengths[b]]`; everything before is forgotten."""
        self._rows = [row[:length] for row, length in zip(p, lengths, strict=True)]
        self._starts = starts


@dataclass
class RollingMemory(Memory):
    """What a rolling verifier remembers of a call.

    Attributes:
        rounds: `int64 (batch, length)`: verification rounds that each draft token has had.
        offset: `int64 (batch, length)`: how far from its source it was drafted; 0 for the backbone's own prediction.
        frozen: `bool (batch, length)`: has had its rounds and will not change, although tokens before it may.
        stale: `bool (batch, length)`: predicted from a left neighbour that the last round changed.
        proposals: what the draft tokens were drawn from.
        all_accepted: by picture, whether the last round changed no token and left none open.
        window: what the pass being made feeds.
        last_rounds: by picture, the rounds that its last draft token has had.
        nearest: `int64 (vocabulary, k)`, for relaxed acceptance.
    """

    rounds: torch.Tensor
    offset: torch.Tensor
    frozen: torch.Tensor
    stale: torch.Tensor
    proposals: Proposals
    all_accepted: list[bool]
    window: RollingWindow | None = None
    last_rounds: list[int] = field(default_factory=list)
    nearest: torch.Tensor | None = None

    @classmethod
    def begin(cls, state: DecodingState) -> "RollingMemory":
        """That of a call in which nothing is drafted yet."""
        zeros = torch.zeros_like(state.sequence)
        return cls(
            rounds=zeros,
            offset=zeros.clone(),
            frozen=zeros.bool(),
            stale=zeros.bool(),
            proposals=Proposals(state.committed.tolist()),
            all_accepted=[True] * state.batch_size,
        )
