"""The output of a pipeline call, and the definition of every decoding statistic."""

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
    """The draft tokens that an acceptance rate is about."""

    direction: str
    """"horizontal" or "vertical": the kind of heads that drafted."""
    offset: int
    """Distance of the draft token from its source cell, in columns or rows."""
    round: int
    """The verification round, from 1; trailing rounds continue the count."""


@dataclass
class DecodingStats:
    """Cost of decoding and quality of the draft tokens.

    Attributes:
        tokens: sequence positions per picture, including forced row ends; autoregressive decoding takes this many
            passes.
        windows: positions that each pass fed, as `(start, stop)`, starting with the prompt's pass. If the pictures of
            a batch fed different positions, `start` is the smallest, and `stop - start` the number that each fed.
        passes: per picture, the passes that it took part in; less than `nfe` if it was finished before others.
        rows_completed: rows of the grid that are final; all of them unless the run was interrupted.
        seconds: wall time by phase: "prompt" (encoding and first pass), "passes" (backbone forward passes, including
            embedding and cache), "correction" (logits, filtering, acceptance and resampling), "drafting" (draft heads
            and sampling from them), "decoding" (codes to pixels), "total".
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
        """Number of backbone forward passes, including the prompt's; both branches of guidance are in one pass."""
        return len(self.windows)

    @property
    def tokens_per_pass(self) -> float:
        """`tokens / nfe`, the step compression relative to autoregressive decoding."""
        return self.tokens / self.nfe if self.nfe else 0.0

    @property
    def acceptance(self) -> dict[AcceptanceKey, float]:
        """Acceptance rate by direction, offset and round: the share of draft tokens that verification kept.

        Round 1 measures the draft tokens of the heads, later rounds the tokens of the previous round. Forced row ends
        and bonus tokens don't count. A token that was rejected and resampled to the same code counts as rejected.
        """
        self._count_rounds()
        return {key: float(self._accepted[key]) / self._verified[key] for key in sorted(self._verified)}

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the heads' draft tokens that round 1 kept, over all directions and offsets; `None` without any."""
        self._count_rounds()
        first = [key for key in self._verified if key.round == 1]
        verified = sum(self._verified[key] for key in first)
        return sum(float(self._accepted[key]) for key in first) / verified if verified else None

    def record_pass(self, window: Window, unfinished: torch.Tensor) -> None:
        """Add a pass.

        Args:
            window: the positions that it fed.
            unfinished: `bool (batch,)` on the CPU: which pictures took part.
        """
        if isinstance(window, Cells):
            window = Span(window.start, window.start + window.positions.shape[1])
        self.windows.append((window.start, window.stop))
        counts = unfinished.tolist()
        self.passes = [a + int(b) for a, b in zip(self.passes or [0] * len(counts), counts, strict=True)]

    def record_acceptance(self, key: AcceptanceKey, accepted: torch.Tensor) -> None:
        """Add verified cells.

        Args:
            key: direction, offset and round of all of them.
            accepted: `bool` mask of any shape. It is summed on its own device, so that the decode loop doesn't wait.
        """
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
        """Add the cells of a verification round; they are counted when a statistic is requested.

        Args:
            accepted, verified: `bool (batch, n)`: cells that the round kept, and cells that it verified.
            positions: `int64 (batch, n)`, sequence positions.
            offset, round: `int64 (batch, n)`: distance from the source cell, 0 for the backbone's own draws, which
                don't count; and the round, from 1. Values above 15 are counted as 15.
            first_vertical: cells before this position were drafted along their row, the others from above.
        """
        self._rounds.append((accepted, verified, positions - first_vertical, offset, round))

    def _count_rounds(self) -> None:
        """Count the cells of `record_round` in the two dictionaries; waits for the device once."""
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
        """All statistics as plain numbers, for JSON."""
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
    """Measures wall time by phase without making the host wait for the device.

    On CUDA, events are recorded in the stream and read once at the end. On other devices the host's clock is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started = time.perf_counter()
        self._host: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that adds its time to a phase; a nested phase's time is not counted for the outer one."""
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
        """Seconds by phase, and "total" since the clock was created; waits for the device."""
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
            `(batch, 3, height, width)` in [0, 1], or with `output_type="latent"` the codes.
        codes: image codes `int64 (batch, rows, columns)` for every output type, negative where an interrupted run has
            none.
        stats: statistics of decoding.
    """

    images: Any
    codes: torch.Tensor
    stats: DecodingStats
