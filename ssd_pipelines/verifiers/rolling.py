"""The rolling window: drafts are corrected in every pass while the window moves on behind them.

A pass feeds, for each picture, what is final but not in the cache yet, then drafts in any number of rounds. Every draft
is drawn anew, all at once. What comes out decides how far the window moves:

- the tokens up to and including the first one that changed are exact, for they were predicted beside final tokens;
- keys and values before the first change are those of the final tokens, so they stay;
- in a lossy decoder, a token that has had its rounds is final as it stands, unless refresh has just redrawn it.

Lossless decoding uses the first rule alone. Which segment is drafted next, and from what, is up to the subclass.

Sources: Jacobi decoding with a probabilistic criterion, arXiv 2410.01699; shared noise and maximal coupling between
rounds, arXiv 2510.24211; drafts from spatial heads, arXiv 2606.20543. Merged commits and row refresh are ours.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ssd_pipelines.grid import Cells, Span, Window
from ssd_pipelines.sampling import accept_or_resample, draw_coupled, shape
from ssd_pipelines.verifiers.base import DecodingState, Verifier
from ssd_pipelines.verifiers.refresh import refresh


@dataclass
class Rolling:
    """What a rolling verifier remembers of a call.

    Attributes:
        rounds: `int64 (batch, length)`: rounds that each draft has had.
        offset: `int64 (batch, length)`: how far from its source it was drafted.
        frozen: `bool (batch, length)`: not drawn again, though what lies before may be.
        proposals: with residual coupling, by picture `float32 (n, vocabulary)`: what the drafts from `proposal_start`
            on were last drawn from.
        beside: `bool (batch, length)`: what stands right of a token that the last round changed.
        window: what the pass being made feeds.
        unchanged: by picture, whether the last pass changed nothing and left nothing open.
        last_rounds: by picture, the rounds that its last draft has had.
    """

    rounds: torch.Tensor
    offset: torch.Tensor
    frozen: torch.Tensor
    beside: torch.Tensor
    unchanged: list[bool]
    window: "Open | None" = None
    last_rounds: list[int] = field(default_factory=list)
    proposals: list[torch.Tensor] = field(default_factory=list)
    proposal_start: list[int] = field(default_factory=list)


class Open:
    """The window of a pass. Its first `fed_only` positions are final in every picture: they are fed, and their
    predictions are of no interest. All else here is about the columns behind them: column j of picture b is position
    `committed[b] + fed_only + j`.

    Attributes:
        fed_only: how many positions are final in every picture.
        width: how many columns the picture with the most of them has.
        lengths: `int64 (batch,)` on the CPU: columns of each picture; 0 for one that is done, or has none behind them.
        start, stop: the least position of all, and one more than the largest.
        is_span: whether all pictures have the same positions.
        positions: `int64 (batch, width)`; beyond its own columns a picture repeats its last position.
        own: `bool (batch, width)`: which columns are a picture's own; `None` if all are.
    """

    def __init__(self, state: DecodingState) -> None:
        device, end = state.sequence.device, state.grid.length
        committed, settled, drafted = (at.tolist() for at in (state.committed, state.settled, state.drafted))
        done = [at == end for at in settled]
        lengths = [0 if d else b - a for a, b, d in zip(committed, drafted, done, strict=True)]
        skip = min((s - a for a, s, d in zip(committed, settled, done, strict=True) if not d), default=0)
        longest = max(lengths)
        self.fed_only, self.width = skip, longest - skip
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

    def window(self) -> Window:
        if self.is_span:
            return Span(self._start, self.stop)
        return Cells(self._fed, min(self._start, self.stop - 1), self.stop)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of what `(batch, length)` holds at the window's positions, `(batch, width)`."""
        if self.is_span:
            return values[:, self.start : self.stop].clone()
        return values.gather(1, self.positions)

    def write(self, values: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put `(batch, width)` at the window's positions of `(batch, length)`, in place; returns the latter."""
        if self.is_span:
            values[:, self.start : self.stop] = new
            return values
        return values.scatter_(1, self.positions, self.spread(new))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Give a picture's repeated columns the value of the one they repeat, so that writing is well defined."""
        return values if self._columns is None else values.gather(1, self._columns)


class RollingVerifier(Verifier):
    """Base of all decoders with a rolling window. Its config has at least `coupling`."""

    # --- what a subclass decides ------------------------------------------------------------------------------------

    @property
    def adaptive(self) -> bool:
        """Whether tokens up to the first change are final, whatever their rounds."""
        return True

    @property
    def along_rows(self) -> bool:
        """Whether all drafts come from along the row, for statistics."""
        return False

    @property
    def fills_window(self) -> bool:
        """Whether drafts come by `fill_to`, which sees to refresh; else a round does."""
        return True

    @property
    def sweeps(self) -> int:
        """How often predictions beside a changed left neighbour are refreshed after a round."""
        return 0

    @property
    def greedy(self) -> bool:
        """Whether heads draft their likeliest token."""
        return False

    @property
    def confidence_threshold(self) -> float | None:
        """Tokens of less probability take further rounds."""
        return None

    @property
    def num_neighbors(self) -> int:
        """With residual coupling: so many similar codes are accepted for one another; 0 is exact."""
        return 0

    def limit(self, row: int) -> int | None:
        """Rounds after which a draft of this row may be final; `None` if only exact tokens are."""
        return None

    @abstractmethod
    def extend(self, state: DecodingState) -> None:
        """Draft what the next pass feeds beside what there is, and move `state.drafted`."""

    # --- the verifier's contract ------------------------------------------------------------------------------------

    def next_window(self, state: DecodingState) -> Window | None:
        if int(state.settled.min()) == state.grid.length:
            return None
        if state.passes == 0:
            return Span(0, int(state.settled[0]))
        state.memory.window = Open(state)
        return state.memory.window.window()

    def step(self, state: DecodingState) -> None:
        if state.passes == 0:
            zeros = torch.zeros_like(state.sequence)
            state.memory = Rolling(zeros, zeros.clone(), zeros.bool(), zeros.bool(), [True] * state.batch_size)
            state.committed = state.settled
            state.memory.proposal_start = state.committed.tolist()
        else:
            with state.clock.phase("correction"):
                self._round(state)
        if state._noise is not None:
            state._noise.forget(int(state.committed.min()))
        with state.clock.phase("drafting"):
            self.extend(state)

    def passes_left(self, state: DecodingState) -> int:
        return state.grid.length - int(state.settled.min())

    # --- a round ----------------------------------------------------------------------------------------------------

    def _round(self, state: DecodingState) -> None:
        """Draw all open tokens anew, see how far they are final, and refresh the predictions that went stale."""
        memory: Rolling = state.memory
        window = memory.window
        assert window is not None, "a round follows a window"
        if window.width == 0:
            # Drafts that nobody verifies were fed: they are committed, and that is all.
            state.committed = state.settled
            memory.beside.zero_()
            return
        positions, device = window.positions, window.positions.device
        limits = self._limits(state, positions)
        fed = window.read(state.sequence)
        open_ = positions >= state.settled.to(device)[:, None]
        if window.own is not None:
            open_ &= window.own
        if state.grid.row_end:
            open_ &= positions % state.grid.stride < state.grid.columns
        if limits is not None:
            open_ &= ~window.read(memory.frozen)

        pictures = torch.arange(state.batch_size, device=device)
        hidden = state.states(window.start, window.stop) if window.is_span else state.states_at(pictures, positions)
        logits = state.head(hidden)
        p = None
        if self.config.coupling == "gumbel":
            noise = state.noise(logits.shape[-1])
            around = (
                noise.between(window.start, window.stop)
                if window.is_span
                else noise.at(pictures, positions, int(state.committed.min()), window.stop)
            )
            drawn = draw_coupled(logits, around, state.sampling)
            accepted = drawn == fed
        else:
            p = shape(logits, state.sampling)
            drawn, accepted = self._accept(state, window, fed, p)
        new = window.spread(torch.where(open_, drawn, fed))
        changed = new != fed
        rounds, offset = window.read(memory.rounds).add_(open_), window.read(memory.offset)
        state.stats.record_round(
            accepted, open_, positions, offset, rounds, state.grid.length if self.along_rows else state.grid.stride
        )

        # Columns up to `first` are exact, for all before them are what was fed.
        j = torch.arange(window.width, device=device)
        first = torch.where(changed, j, window.width).amin(1)
        window.write(state.sequence, new)
        if p is not None:
            memory.proposals = [row[:length] for row, length in zip(p, window.lengths.tolist(), strict=True)]
            memory.proposal_start = (state.committed + window.fed_only).tolist()
        unsure: torch.Tensor | None = None
        if self.confidence_threshold is not None:
            p = shape(logits, state.sampling) if p is None else p
            unsure = p.gather(-1, new.clamp_min(0)[..., None]).squeeze(-1) < self.confidence_threshold
        if self.sweeps:
            memory.beside = window.write(torch.zeros_like(memory.beside), changed).roll(1, 1)
        if self.sweeps and not self.fills_window:
            with state.clock.phase("drafting"):
                movable = window.write(torch.zeros_like(memory.beside), open_ & (j > first[:, None]))
                redrawn = torch.zeros_like(memory.beside)
                starts, stops, coupling = state.settled, state.drafted, self.config.coupling
                refresh(state, memory.beside, movable, starts, stops, self.sweeps, coupling, redrawn=redrawn)
            redrawn = window.read(redrawn)
            unsure = redrawn if unsure is None else unsure | redrawn  # the heads' word alone is never final
        window.write(memory.rounds, rounds)

        if limits is not None:
            enough = open_ & (rounds >= limits)
            if unsure is not None:
                enough &= ~unsure | (j <= first[:, None])  # what is exact will not get surer
            window.write(memory.frozen, enough | window.read(memory.frozen))
            open_ = open_ & ~enough
        if self.adaptive:
            open_ = open_ & (j > first[:, None])
        # All is final before the first column that is still open.
        run = torch.where(open_, j, window.width).amin(1)
        # The host waits here, once a pass: it has to know where the next window lies.
        ends = torch.minimum(torch.stack([first, run]).cpu(), window.lengths)
        memory.unchanged = (ends == window.lengths).all(0).tolist()
        first, run = ends + window.fed_only
        active = state.settled < state.grid.length
        state.settled = torch.where(active, state.committed + run, state.settled)
        state.committed = torch.where(active, state.committed + torch.minimum(first, run), state.committed)

    def _accept(
        self, state: DecodingState, window: Open, fed: torch.Tensor, p: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep each token with probability `min(1, p / q)`, else draw it from the residual."""
        q, uniforms = self._acceptance_inputs(state, window, p)
        near = None
        if self.num_neighbors:
            near = state.nearest_codes(p.shape[-1], self.num_neighbors)
        return accept_or_resample(fed.clamp_min(0), p, q, uniforms, near)

    def _acceptance_inputs(
        self, state: DecodingState, window: Open, p: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What tokens were last drawn from, in the shape of `p`, and uniform numbers `(2, batch, n)`."""
        memory: Rolling = state.memory
        q = torch.zeros_like(p)
        starts, lengths = self._open_columns(state, window)
        for b, (length, begin) in enumerate(zip(lengths, memory.proposal_start, strict=True)):
            shift = int(state.committed[b]) + window.fed_only - begin
            known = memory.proposals[b][shift : shift + length]
            q[b, : len(known)] = known
        return q, state.ragged_uniforms(2, starts, lengths)

    @staticmethod
    def _open_columns(state: DecodingState, window: Open) -> tuple[list[int], list[int]]:
        """By picture, the columns from and to which tokens are not settled."""
        starts = (state.settled - state.committed - window.fed_only).clamp_min(0).tolist()
        return starts, window.lengths.tolist()

    def _limits(self, state: DecodingState, positions: torch.Tensor) -> torch.Tensor | int | None:
        first_row, others = self.limit(0), self.limit(1)
        if first_row is None or others is None:
            return None
        if first_row == others:
            return others
        return torch.where(positions < state.grid.stride, first_row, others)

    # --- drafting ---------------------------------------------------------------------------------------------------

    def fill_to(self, state: DecodingState, length: int, fill: Callable[[DecodingState, torch.Tensor], None]) -> None:
        """Draft so far that the next pass feeds `length` positions, then refresh what is stale, new drafts and all.

        Args:
            fill: drafts to the ends `int64 (batch,)` that it is given.
        """
        grid = state.grid
        # What follows an unchanged window is predicted behind final tokens alone: its first cell is exact.
        exact = (state.settled == state.drafted) & torch.tensor(state.memory.unchanged)
        # A forced row end goes with the last code of its row.
        first_free, ends = (
            (end + (end % grid.stride == grid.columns) * int(grid.row_end)).clamp_max(grid.length)
            for end in (state.settled + 1, state.committed + length)
        )
        before = state.drafted
        fill(state, torch.maximum(ends, first_free))
        state.settled = torch.where(exact, first_free, state.settled)
        if self.sweeps:
            self.refresh_drafts(state, state.settled, before, state.memory.beside)

    def refresh_drafts(
        self, state: DecodingState, starts: torch.Tensor, before: torch.Tensor, stale: torch.Tensor | None = None
    ) -> None:
        """Sweeps over stale tokens and, if there is a row head, new drafts; the backbone's own count as no new ones.

        Args:
            starts: `int64 (batch,)`, the first position that may be drawn again.
            before: where the drafts ended that were there already.
            stale: `bool (batch, length)`; none by default.
        """
        sees_row = state.heads is not None and state.heads.row is not None
        if stale is None:
            if not sees_row:
                return
            stale = torch.zeros_like(state.memory.beside)
        positions, coupling = torch.arange(state.grid.length), self.config.coupling
        is_open = (positions >= starts[:, None]) & (positions < state.drafted[:, None])
        if sees_row:
            stale = stale | (positions > before[:, None]).to(stale.device)
        movable = is_open.to(stale.device)
        refresh(state, stale, movable, starts, state.drafted, self.sweeps, coupling, greedy=self.greedy)
