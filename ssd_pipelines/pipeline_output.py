"""What a call returns, and every statistic of decoding, each defined once and here."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from diffusers.utils import BaseOutput

from ssd_pipelines.grid import Cells, Span, Window


class AcceptanceKey(NamedTuple):
    """Which drafts an acceptance rate speaks of."""

    direction: str
    """"horizontal" or "vertical": the heads that drafted."""
    offset: int
    """How far from its source the draft lay: columns, or rows."""
    round: int
    """The verification round, from 1; trailing rounds count on."""


@dataclass
class DecodingStats:
    """What decoding cost and how good the drafts were.

    Attributes:
        tokens: sequence positions a picture, forced row ends included; autoregressive decoding takes as many passes.
        windows: what each pass fed, as `(start, stop)`; the prompt's pass comes first. Where pictures of a batch feed
            positions of their own, `start` is the first of them all and `stop - start` how many each feeds.
        passes: by picture, the passes that it took part in; less than `nfe` for one that is done before others.
        rows_completed: rows of the grid that were committed; all of them unless the run was interrupted.
        seconds: wall time by phase: "prompt" (encoding and first pass), "passes" (the backbone over windows, its
            embedding and cache included), "correction" (logits, shaping, acceptance and draws), "drafting" (heads and
            the draws from them), "decoding" (codes to pixels), "total".
    """

    tokens: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    rows_completed: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    _accepted: dict[AcceptanceKey, torch.Tensor] = field(default_factory=dict, repr=False)
    _verified: dict[AcceptanceKey, int] = field(default_factory=lambda: defaultdict(int), repr=False)
    _rounds: list[tuple[torch.Tensor, ...]] = field(default_factory=list, repr=False)

    @property
    def nfe(self) -> int:
        """Number of backbone forward evaluations: a guided pair batched together is one, and so is the prompt's."""
        return len(self.windows)

    @property
    def tokens_per_pass(self) -> float:
        """`tokens / nfe`, the step compression against autoregressive decoding."""
        return self.tokens / self.nfe if self.nfe else 0.0

    @property
    def acceptance(self) -> dict[AcceptanceKey, float]:
        """By direction, offset and round: the share of drafted cells that verification kept in that round.

        In round 1 it rates the heads' drafts, later the tokens of the round before. Forced row ends don't count, no
        bonus token does. A token that was rejected and drawn again to the same code counts as rejected.
        """
        self._count_rounds()
        return {key: float(self._accepted[key]) / self._verified[key] for key in sorted(self._verified)}

    @property
    def acceptance_rate(self) -> float | None:
        """Over all directions and offsets: the share of the heads' drafts kept in round 1; `None` without any."""
        self._count_rounds()
        first = [key for key in self._verified if key.round == 1]
        verified = sum(self._verified[key] for key in first)
        return sum(float(self._accepted[key]) for key in first) / verified if verified else None

    def record_pass(self, window: Window, unfinished: torch.Tensor) -> None:
        """Add a pass; `unfinished` `bool (batch,)` on the CPU says which pictures took part."""
        if isinstance(window, Cells):
            window = Span(window.start, window.start + window.positions.shape[1])
        self.windows.append((window.start, window.stop))
        counts = unfinished.tolist()
        self.passes = [a + int(b) for a, b in zip(self.passes or [0] * len(counts), counts, strict=True)]

    def record_acceptance(self, key: AcceptanceKey, accepted: torch.Tensor) -> None:
        """Add a `bool` mask of verified cells; summed where it lies, so that the decode loop needn't wait for it."""
        total = accepted.sum()
        self._accepted[key] = self._accepted[key] + total if key in self._accepted else total
        self._verified[key] += accepted.numel()

    def record_round(
        self,
        accepted: torch.Tensor,
        verified: torch.Tensor,
        positions: torch.Tensor,
        offset: torch.Tensor,
        round: torch.Tensor,
        first_vertical: int,
    ) -> None:
        """Add cells of any offsets and rounds (from 1), all `(batch, n)`, drafted along a row before the position
        `first_vertical` and down from there on. Those count that are `verified` and have an offset, which the
        backbone's own draws don't. Rounds and offsets beyond the 15th are counted with the 15th. Kept as they are, and
        counted when somebody asks."""
        self._rounds.append((accepted, verified, positions - first_vertical, offset, round))

    def _count_rounds(self) -> None:
        """Bring what `record_round` kept into the two dictionaries; waits for the device, once."""
        if not self._rounds:
            return
        kept = zip(*self._rounds, strict=True)
        accepted, verified, down, offset, round = (torch.cat([t.flatten() for t in part]).cpu() for part in kept)
        self._rounds = []
        verified &= offset > 0
        index = ((down >= 0) * 16 + offset.clamp(max=15)) * 16 + round.clamp(max=15)
        counts = torch.zeros(2, 2 * 16 * 16)
        counts.scatter_add_(1, index.expand(2, -1), torch.stack([accepted & verified, verified]).float())
        accepted, verified = counts.view(2, 2, 16, 16)
        for down, distance, number in verified.nonzero().tolist():
            key = AcceptanceKey("vertical" if down else "horizontal", distance, number)
            self._accepted[key] = accepted[down, distance, number] + self._accepted.get(key, 0.0)
            self._verified[key] += int(verified[down, distance, number])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "nfe": self.nfe,
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens_per_pass,
            "passes": self.passes,
            "rows_completed": self.rows_completed,
            "windows": self.windows,
            "acceptance_rate": self.acceptance_rate,
            "acceptance": [{**key._asdict(), "rate": rate} for key, rate in self.acceptance.items()],
            "seconds": self.seconds,
        }


class PhaseClock:
    """Splits wall time into phases without making the host wait for the device.

    On CUDA, events are recorded in the stream and read once at the end; elsewhere the host's clock is the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started = time.perf_counter()
        self._host: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent within counts for this phase; within another phase, no longer for that one."""
        outer = self._open[-1] if self._open else None
        self._open.append(name)
        if self._cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((name, outer, start, stop))
        else:
            begin = time.perf_counter()
            yield
            self._add(name, outer, time.perf_counter() - begin)
        self._open.pop()

    def _add(self, name: str, outer: str | None, seconds: float) -> None:
        self._host[name] += seconds
        if outer is not None:
            self._host[outer] -= seconds

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and "total" since the clock was made; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            for name, outer, start, stop in self._events:
                self._add(name, outer, start.elapsed_time(stop) / 1000)
            self._events.clear()
        return {**self._host, "total": time.perf_counter() - self._started}


@dataclass
class SpatialSpeculativePipelineOutput(BaseOutput):
    """Output of [`SpatialSpeculativePipeline`].

    Attributes:
        images: a list of `PIL.Image`, a NumPy array `(batch, height, width, 3)` in [0, 1], a tensor
            `(batch, 3, height, width)` in [0, 1], or with `output_type="latent"` the codes, `int64`
            `(batch, rows, columns)`, negative where an interrupted run has none.
        codes: the codes, whatever the output type.
        stats: what it cost.
    """

    images: Any
    codes: torch.Tensor
    stats: DecodingStats
