"""Drafting a segment at a time, a few cells of a row or whole rows, when those before have had their rounds."""

from abc import abstractmethod
from collections import defaultdict

import torch

from ssd_pipelines.verifiers.base import DecodingState
from ssd_pipelines.verifiers.drafting import write_drafts, write_guesses
from ssd_pipelines.verifiers.rolling import RollingVerifier


class SegmentVerifier(RollingVerifier):
    """A rolling window that can grow by segments."""

    @abstractmethod
    def next_segment(self, state: DecodingState, committed: int, settled: int, drafted: int, rounds: int) -> int:
        """Where the segment ends that is drafted next behind `drafted` in one picture; `drafted` itself for none yet.

        Args:
            rounds: that the last drafted token has had.
        """

    @abstractmethod
    def propose(self, state: DecodingState, pictures: torch.Tensor, start: int, stop: int) -> None:
        """Draft positions `start` to `stop` of some pictures `(n,)`, by `self.put`."""

    def extend_by_segments(self, state: DecodingState) -> None:
        """Draft the next segment of every picture that is ready for one; alike pictures together."""
        memory = state.memory
        length = state.grid.length
        last = (state.drafted - 1).clamp_min(0)
        last = (last - (last % state.grid.stride == state.grid.columns).long()).to(state.sequence.device)[:, None]
        rounds = memory.rounds.gather(1, last).squeeze(1).tolist() if state.passes else [0] * state.batch_size
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        ends = []
        for b, (committed, settled, drafted) in enumerate(
            zip(state.committed.tolist(), state.settled.tolist(), state.drafted.tolist(), strict=True)
        ):
            stop = drafted
            if drafted < length:
                stop = self.next_segment(state, committed, settled, drafted, rounds[b])
            if stop > drafted:
                groups[drafted, stop].append(b)
            ends.append(stop)
            rounds[b] = 0 if stop > drafted else rounds[b]
        memory.last_rounds = rounds
        settled_now = state.settled.tolist()
        for (start, stop), members in groups.items():
            pictures = torch.tensor(members, device=state.sequence.device)
            self.propose(state, pictures, start, stop)
            limit = self.limit(start // state.grid.stride)
            for b in members:
                if settled_now[b] != start:
                    continue
                if limit == 0:
                    settled_now[b] = stop  # drafts alone are final
                elif self.adaptive and memory.unchanged[b]:
                    # The backbone drew the first of them behind final tokens; a forced row end may follow.
                    at_end = (start + 1) % state.grid.stride == state.grid.columns and state.grid.row_end
                    settled_now[b] = min(start + 1 + int(at_end), stop)
        state.settled = torch.tensor(settled_now)
        state.drafted = torch.tensor(ends)

    def put(
        self,
        state: DecodingState,
        pictures: torch.Tensor,
        positions: torch.Tensor,
        logits: torch.Tensor,
        offset: torch.Tensor | int,
        greedy: torch.Tensor | bool = False,
    ) -> None:
        """Draw drafts from logits and write them down at positions `(k,)`, see `write_drafts`."""
        span = int(positions[0]), int(positions[-1]) + 1
        write_drafts(state, pictures, positions, span, logits, offset, self.config.coupling, greedy)

    def put_guesses(
        self, state: DecodingState, pictures: torch.Tensor, positions: torch.Tensor, kind: str, vocabulary: int
    ) -> None:
        """Draft without heads at positions `(k,)`, see `write_guesses`."""
        span = int(positions[0]), int(positions[-1]) + 1
        write_guesses(state, pictures, positions, span, kind, vocabulary, self.config.coupling)
