"""Spatially speculative decoding: draft along the first row, then whole rows, and correct them in parallel.

Source: arXiv 2606.20543, sections 3.2 and 3.3, appendix A.3 (the staged schedule) and table 9 (settings). Merged
commits, coupled noise, row refresh, rows in flight and the lossless mode go beyond it.
"""

from typing import Any, Literal

import torch
from diffusers.configuration_utils import register_to_config

from ssd_pipelines.grid import Direction, Span, TokenGrid, Window
from ssd_pipelines.verifiers.base import Coupling, DecodingState, DraftHeads, check_choice, check_count
from ssd_pipelines.verifiers.filling import fill_window
from ssd_pipelines.verifiers.segments import SegmentVerifier
from ssd_pipelines.verifiers.staged import Pass, make_pass, plan


PAPER: dict[str, dict[str, Any]] = {
    "janus": {"rounds": 2},
    "lumina_mgpt": {"block_size": 2, "rounds": 5, "trailing_rounds": 4},
    "emu3": {"rounds": 6},
}
"""The paper's settings by backbone (its table 9)."""


LEAST_WINDOW = 64
"""Of a lossless pass: so many positions cost a GPU little more than one, and two short rows are fewer."""


class SpatialDraftVerifier(SegmentVerifier):
    """Drafts with horizontal heads in the first row and with vertical heads below it, and corrects as it goes.

    By default it takes as many rounds as the drafts need and draws the very picture that [`AutoregressiveVerifier`]
    draws with the same seed. With `rounds` a draft is verified in so many passes, all positions at once, and what
    refresh redraws in the last of them in one more. That is not exact: later positions of a row are judged beside
    earlier ones that change in the same round.

    Args:
        block_size: rows that are drafted together; the heads need as many vertical offsets. A lossless window is
            filled cell by cell instead, each from the row above it.
        rounds: correction rounds of a row, or of a block of rows (b in the paper); `None` is lossless. With `refresh`
            or `confidence_threshold` some tokens take more.
        horizontal_block: tokens that are drafted together in the first row.
        horizontal_rounds: correction rounds of such a block; by default as many as `rounds`.
        horizontal_only: draft every row like the first, the paper's 1D multi-token prediction baseline.
        commit: "merged" feeds the final row and the draft of the next in one pass; "separate" spends a pass on
            committing each block, as in the paper.
        coupling: how a token hangs together with the one it replaces. "gumbel": draft, every round and autoregressive
            decoding use the same noise at a position, so that a round changes no more than it has to, and rounds lead
            to the picture that [`AutoregressiveVerifier`] draws with the same seed. "residual": keep with probability
            `min(1, p/q)`, else draw from `max(0, p - q)`, q being what the token was last drawn from (the paper's).
        lossless: says that `rounds` is to be `None`, so that only exact tokens are final. With "gumbel" the picture is
            the autoregressive one of the same seed, with "residual" it follows the same distribution; never more
            passes than autoregressive decoding.
        window: positions that a lossless pass feeds, filled with drafts to its end; by default two
            rows, and no fewer than 64.
        adaptive: tokens up to the first that a round changed are final at once, and a row that it left unchanged
            needs no more rounds.
        refresh: after a round, this many sweeps redraw the tokens whose left neighbour has changed, from the row head
            (else the first horizontal head), as the backbone's prediction of them is stale; new drafts too, which were
            foreseen from the row above alone. What a round's sweeps redraw takes a further round, for the heads'
            word alone is never final.
        row_lag: rounds that a row has had when the next one is drafted; by default all of them. With fewer, several
            rows are in flight.
        confidence_threshold: a token of less probability than this under the backbone takes further rounds until it is
            exact.
        trailing_rounds: with `commit="separate"`, further rounds of each row of a block after the row above it was
            committed (i in the paper's staged schedule); 0 is the joint schedule.
        draft: "sample" draws from the heads' distribution; "argmax" takes their likeliest token, as the paper does,
            which favours likely tokens beyond their probability. "above" copies the row above and "random" takes any
            codes, without heads: the baselines that show what heads are worth.
        num_neighbors: relaxed acceptance after LANTERN (arXiv 2410.03355): a draft is accepted with the probability
            of itself and of so many codes with the nearest embeddings together. 0 is exact; with "residual" only.
        temperature, top_k, top_p: sampling settings for backbone and drafts alike; `None` takes the backbone's
            recommended ones.

    Source: arXiv 2606.20543; `SpatialDraftVerifier.paper` has its settings.
    """

    needs_heads = True

    @register_to_config
    def __init__(
        self,
        block_size: int = 1,
        rounds: int | None = None,
        horizontal_block: int = 5,
        horizontal_rounds: int | None = None,
        horizontal_only: bool = False,
        commit: Literal["merged", "separate"] = "merged",
        coupling: Coupling = "gumbel",
        lossless: bool = False,
        window: int | None = None,
        adaptive: bool = True,
        refresh: int = 4,
        row_lag: int | None = None,
        confidence_threshold: float | None = None,
        trailing_rounds: int = 0,
        draft: Literal["sample", "argmax", "above", "random"] = "sample",
        num_neighbors: int = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        check_count("block_size", block_size, 1)
        if rounds is not None:
            check_count("rounds", rounds, 0)
        check_count("horizontal_block", horizontal_block, 1)
        if horizontal_rounds is not None:
            check_count("horizontal_rounds", horizontal_rounds, 0)
        check_count("trailing_rounds", trailing_rounds, 0)
        check_count("refresh", refresh, 0)
        check_choice("commit", commit, ("merged", "separate"))
        check_choice("coupling", coupling, ("residual", "gumbel"))
        check_choice("draft", draft, ("sample", "argmax", "above", "random"))
        check_count("num_neighbors", num_neighbors, 0)
        if num_neighbors and coupling == "gumbel":
            raise ValueError('`num_neighbors` relaxes acceptance, which only `coupling="residual"` has: set it to 0.')
        if window is not None:
            check_count("window", window, 1)
        if row_lag is not None:
            check_count("row_lag", row_lag, 1)
        if confidence_threshold is not None and not 0 <= confidence_threshold <= 1:
            raise ValueError(f"`confidence_threshold` must lie in [0, 1], got {confidence_threshold!r}.")
        if lossless and rounds is not None:
            raise ValueError(f"`lossless` takes as many rounds as it needs, but `rounds` is {rounds}: leave it None.")
        exact = rounds is None
        ours = {
            "rounds=None, which is lossless": exact,
            "adaptive=True": adaptive,
            f"refresh={refresh}": refresh > 0,
            f"row_lag={row_lag}": row_lag is not None,
            f"confidence_threshold={confidence_threshold}": confidence_threshold is not None,
            f'draft="{draft}"': draft in ("above", "random"),
            f"num_neighbors={num_neighbors}": num_neighbors > 0,
        }
        if commit == "separate" and any(ours.values()):
            given = ", ".join(name for name, is_set in ours.items() if is_set)
            raise ValueError(
                f"`commit=\"separate\"` is the paper's schedule and can't be combined with {given}: take "
                'SpatialDraftVerifier.paper(), or `commit="merged"`.'
            )
        if commit == "merged" and trailing_rounds:
            raise ValueError('`trailing_rounds` belongs to the paper\'s schedule: set `commit="separate"`, or take 0.')
        if exact and (row_lag is not None or confidence_threshold is not None):
            raise ValueError(
                "`rounds` is None, so `lossless` decoding waits for exact tokens alone: leave `row_lag` and "
                "`confidence_threshold` None, or say how many rounds."
            )
        if exact and draft == "argmax" and coupling == "residual":
            raise ValueError(
                'Lossless decoding with `coupling="residual"` needs `draft="sample"`, whose distribution is known: set '
                "that, or `rounds`."
            )

    @classmethod
    def paper(cls, backbone: str = "janus", **changes: Any) -> "SpatialDraftVerifier":
        """The paper's algorithm with its settings for a backbone: "janus", "lumina_mgpt" or "emu3".

        Example:
            >>> SpatialDraftVerifier.paper("emu3").config.rounds
            6
        """
        check_choice("backbone", backbone, tuple(PAPER))
        settings = {
            "commit": "separate",
            "coupling": "residual",
            "adaptive": False,
            "refresh": 0,
            "horizontal_rounds": 1,
            "draft": "argmax",
        }
        return cls(**{**settings, **PAPER[backbone], **changes})

    def check(self, grid: TokenGrid, heads: DraftHeads | None) -> None:
        if heads is None:
            raise ValueError(
                "SpatialDraftVerifier needs draft heads: pass `heads=` to `from_pretrained`, call `load_ssd_heads`, or "
                "decode with an AutoregressiveVerifier."
            )
        needed: list[tuple[Direction, str, int, int]] = []
        if grid.columns > 1:
            value = min(self.config.horizontal_block, grid.columns - 1)
            needed.append(("horizontal", "horizontal_block", value, heads.config.num_horizontal))
        if grid.rows > 1 and not self.config.horizontal_only:
            value = min(self.config.block_size, grid.rows - 1)
            needed.append(("vertical", "block_size", value, heads.config.num_vertical))
        for direction, name, value, available in needed:
            if value > available:
                raise ValueError(
                    f"`{name}` is {value}, but the draft heads have {available} {direction} offsets: lower it to "
                    f"{available} or load heads with more."
                )

    # --- the rolling window -----------------------------------------------------------------------------------------

    @property
    def is_lossless(self) -> bool:
        """Whether only exact tokens are final."""
        return self.config.rounds is None

    @property
    def fills_window(self) -> bool:
        return self.is_lossless and not self.config.horizontal_only

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive or self.is_lossless

    @property
    def sweeps(self) -> int:
        return self.config.refresh

    @property
    def greedy(self) -> bool:
        return self.config.draft == "argmax"

    @property
    def confidence_threshold(self) -> float | None:
        return self.config.confidence_threshold

    @property
    def num_neighbors(self) -> int:
        return self.config.num_neighbors

    @property
    def along_rows(self) -> bool:
        return self.config.horizontal_only

    def limit(self, row: int) -> int | None:
        if self.is_lossless:
            return None
        return self._horizontal_rounds if row == 0 or self.config.horizontal_only else self.config.rounds

    @property
    def _horizontal_rounds(self) -> int:
        c = self.config
        return (c.rounds if c.horizontal_rounds is None else c.horizontal_rounds) or 0

    def next_segment(self, state: DecodingState, committed: int, settled: int, drafted: int, rounds: int) -> int:
        c, grid = self.config, state.grid
        row = drafted // grid.stride
        if row == 0 or c.horizontal_only:
            row_stop = row * grid.stride + grid.columns
            stop = min(drafted + 1 + c.horizontal_block, row_stop)
            if stop == row_stop:
                stop += int(grid.row_end)  # a forced row end goes with the last code of its row
            lag = self._horizontal_rounds
        else:
            stop = min(row + c.block_size, grid.rows) * grid.stride
            lag = (c.rounds or 0) if c.row_lag is None else c.row_lag
        if settled == drafted:
            return stop
        if self.is_lossless:
            return stop if stop - committed <= self._window_length(grid) else drafted
        return stop if rounds >= lag else drafted

    def extend(self, state: DecodingState) -> None:
        if self.fills_window:
            self.fill_to(state, self._window_length(state.grid), self._fill)
            return
        before, c = state.drafted, self.config
        self.extend_by_segments(state)
        if self.sweeps and c.draft in ("sample", "argmax") and not c.horizontal_only:
            # New rows. What was there already was refreshed after its round; drafts of the first row come from a state
            # that a pass has brought, which serves them better.
            self.refresh_drafts(state, before.clamp_min(state.grid.stride), before)

    def _window_length(self, grid: TokenGrid) -> int:
        return self.config.window or max(2 * grid.stride, LEAST_WINDOW)

    def _fill(self, state: DecodingState, ends: torch.Tensor) -> None:
        c = self.config
        fill_window(state, ends, c.draft, c.coupling, c.horizontal_block)

    def propose(self, state: DecodingState, pictures: torch.Tensor, start: int, stop: int) -> None:
        if start < state.grid.stride or self.config.horizontal_only:
            self._propose_along(state, pictures, start, stop)
        else:
            self._propose_below(state, pictures, start, stop)

    def _propose_along(self, state: DecodingState, pictures: torch.Tensor, start: int, stop: int) -> None:
        """The backbone's own prediction of the first position, then the horizontal heads' of those behind it."""
        assert state.heads is not None
        greedy = self.config.draft == "argmax"
        source = torch.tensor([start], device=pictures.device)
        at = source.expand(len(pictures), 1)
        self.put(state, pictures, source, state.head(state.states_at(pictures, at)), 0)
        count = stop - start - 1 - int(stop % state.grid.stride == 0 and state.grid.row_end)
        if count > 0 and self.config.draft in ("above", "random"):
            kind = "random" if self.config.draft == "random" else "left"
            offsets = torch.arange(1, count + 1, device=pictures.device)
            self.put_guesses(state, pictures, source + offsets, kind, state.heads.config.image_vocab_size)
        elif count > 0:
            embeddings = state.embed(state.sequence[pictures[:, None], at])
            predicted = state.heads(state.states_at(pictures, at), embeddings, "horizontal", count).flatten(1, 2)
            offsets = torch.arange(1, count + 1, device=pictures.device)
            self.put(state, pictures, source + offsets, state.head(predicted), offsets, greedy)

    def _propose_below(self, state: DecodingState, pictures: torch.Tensor, start: int, stop: int) -> None:
        """Whole rows from the vertical heads; their very first cell is the backbone's own prediction."""
        assert state.heads is not None
        grid = state.grid
        columns = torch.arange(grid.columns, device=pictures.device)
        if self.config.draft in ("above", "random"):
            positions = torch.arange(start, stop, device=pictures.device)
            cells = positions[positions % grid.stride < grid.columns]
            first = cells[:1].expand(len(pictures), 1)
            self.put(state, pictures, cells[:1], state.head(state.states_at(pictures, first)), 0)
            vocabulary = state.heads.config.image_vocab_size
            self.put_guesses(state, pictures, cells[1:], self.config.draft, vocabulary)
            return
        above = (start - grid.stride + columns).expand(len(pictures), -1)
        embeddings = state.embed(state.sequence[pictures[:, None], above])
        rows = (stop - start) // grid.stride
        predicted = state.heads(state.states_at(pictures, above), embeddings, "vertical", rows)
        first = torch.tensor([[start]], device=pictures.device).expand(len(pictures), 1)
        predicted[:, 0, :1] = state.states_at(pictures, first)
        offsets = torch.arange(rows, device=pictures.device)[:, None]
        positions = (start + offsets * grid.stride + columns).flatten()
        distance = (offsets + 1).repeat(1, grid.columns).flatten()
        distance[0] = 0
        logits = state.head(predicted.flatten(1, 2))
        self.put(state, pictures, positions, logits, distance, (distance > 0) & (self.config.draft == "argmax"))

    # --- the paper's schedule ---------------------------------------------------------------------------------------

    def next_window(self, state: DecodingState) -> Window | None:
        if self.config.commit == "merged":
            return super().next_window(state)
        schedule = self._schedule(state)
        return Span(*schedule[state.passes].window) if state.passes < len(schedule) else None

    def passes_left(self, state: DecodingState) -> int:
        if self.config.commit == "merged":
            return self._merged_passes_left(state)
        return len(self._schedule(state)) - state.passes

    def step(self, state: DecodingState) -> None:
        if self.config.commit == "merged":
            super().step(state)
            return
        make_pass(state, self._schedule(state)[state.passes], self.config.draft, self.config.coupling)

    def _merged_passes_left(self, state: DecodingState) -> int:
        """The rounds of what is drafted, and those of each segment to come; single tokens may take more."""
        exact = super().passes_left(state)
        if self.is_lossless:
            return exact
        grid, drafted, left = state.grid, int(state.drafted.min()), int(state.passes == 0)
        if int(state.settled.min()) < drafted:
            needed = self.limit(max(drafted - 1, 0) // grid.stride) or 1
            left += max(1, needed - min(state.memory.last_rounds))
        while drafted < grid.length:
            limit = self.limit(drafted // grid.stride)
            drafted = self.next_segment(state, drafted, drafted, drafted, 0)
            left += max(1, limit or 1)
        return min(exact, left)

    def _schedule(self, state: DecodingState) -> tuple[Pass, ...]:
        c = self.config
        return plan(
            state.grid,
            state.start_row,
            c.block_size,
            c.rounds,
            c.trailing_rounds,
            c.horizontal_block,
            self._horizontal_rounds,
            c.horizontal_only,
        )
