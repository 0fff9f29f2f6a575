"""Spatially speculative decoding: draft tokens from spatial heads, along the first row and then row by row.

Source: arXiv 2606.20543, sections 3.2 and 3.3, appendix A.3 (the staged schedule) and table 9 (settings). Merged
commits, coupled noise, row refresh, several open rows and the lossless mode go beyond it.
"""

from typing import Any, Literal

from diffusers.configuration_utils import register_to_config

from ssd_pipelines.grid import Direction, Span, TokenGrid, Window
from ssd_pipelines.verifiers.acceptance import acceptance_rule
from ssd_pipelines.verifiers.base import check_choice, check_count
from ssd_pipelines.verifiers.drafter import Drafter
from ssd_pipelines.verifiers.finality import FinalityRule
from ssd_pipelines.verifiers.lookahead import LookaheadSegments, LookaheadWindow
from ssd_pipelines.verifiers.refresh import Refresh
from ssd_pipelines.verifiers.rolling import Parts, RollingVerifier
from ssd_pipelines.verifiers.staged import Pass, make_pass, plan
from ssd_pipelines.verifiers.state import Coupling, DecodingState, DraftHeads
from ssd_pipelines.verifiers.window import RollingMemory


PAPER: dict[str, dict[str, Any]] = {
    "janus": {"rounds": 2},
    "lumina_mgpt": {"block_size": 2, "rounds": 5, "trailing_rounds": 4},
    "emu3": {"rounds": 6},
}
"""The paper's settings by backbone (its table 9)."""


class SpatialDraftVerifier(RollingVerifier):
    """Drafts with horizontal heads in the first row and with vertical heads below it, and corrects as it goes.

    By default a draft token is verified until it is exact, so the picture is the one that [`AutoregressiveVerifier`]
    draws with the same seed. With `rounds`, a draft token is final after that many verification rounds. That is not
    lossless: a round resamples all positions of a row at the same time, so a token may depend on one that changes.

    Args:
        block_size: rows that are drafted together; the heads need as many vertical offsets. A lossless lookahead
            window doesn't use it: there each row is drafted from the row directly above.
        rounds: verification rounds of a row, or of a block of rows (b in the paper); `None` is lossless. `refresh` and
            `confidence_threshold` can add rounds to some tokens.
        horizontal_block: tokens that are drafted together in the first row.
        horizontal_rounds: verification rounds of such a block; by default as many as `rounds`.
        horizontal_only: draft every row like the first, the paper's 1D multi-token prediction baseline.
        commit: "merged" feeds final tokens and the draft tokens after them in one pass; "separate" spends a pass on
            writing each block to the cache, as in the paper.
        coupling: how a resampled token is correlated with the one it replaces. "gumbel": draft tokens, every round and
            autoregressive decoding use the same Gumbel noise at a position. A round then changes few tokens, and
            rounds converge to the picture that [`AutoregressiveVerifier`] draws with the same seed. "residual": keep
            a token with probability `min(1, p/q)`, else draw from `max(0, p - q)`; q is the distribution that the
            token was last drawn from (the paper's).
        lossless: states that `rounds` is `None`, so that only exact tokens are final. With "gumbel" the picture is the
            autoregressive one of the same seed; with "residual" it follows the same distribution. Never more passes
            than autoregressive decoding.
        window: positions that a lossless pass feeds, draft tokens up to its end; by default two rows, and no fewer
            than 64.
        adaptive: the tokens up to the first one that a round changed are final at once, whatever their rounds; so is a
            row that a round left unchanged.
        refresh: how many times, before each pass, the draft heads resample tokens whose prediction is stale: the left
            neighbour has changed since, or the token was drafted from the row above alone. The row head predicts them,
            or the first horizontal head without one. With `rounds`, a token that was resampled in this way takes a
            further round: a token from a draft head is never final before the backbone has verified it.
        row_lag: rounds of a row after which the next one is drafted; by default all of them. With fewer, several rows
            are open at a time.
        confidence_threshold: a token of less probability than this under the backbone takes further rounds, until it
            is exact.
        trailing_rounds: with `commit="separate"`, further rounds of each row of a block once the row above it is final
            (i in the paper's staged schedule); 0 is the joint schedule.
        draft: "sample" draws from the heads' distribution. "argmax" takes their likeliest token, as the paper does; it
            prefers likely tokens beyond their probability. "above" copies the row above and "random" takes random
            codes, without heads: baselines that show the value of heads.
        num_neighbors: relaxed acceptance after LANTERN (arXiv 2410.03355): a draft token is accepted with the
            probability of itself and of that many codes with the nearest embeddings. 0 is exact; with "residual" only.
        temperature, top_k, top_p: sampling settings for backbone and draft heads alike; `None` takes the backbone's
            recommended ones.

    Raises:
        ValueError: for a value outside its range, or settings that exclude each other.

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

    def parts(self) -> Parts:
        c = self.config
        return Parts(
            acceptance=acceptance_rule(c.coupling, c.num_neighbors),
            finality=self._finality(),
            lookahead=self._lookahead(),
            drafter=Drafter(c.draft, c.coupling, c.horizontal_block, c.horizontal_only, chained=self._chained),
            refresh=self._refresh() if c.refresh else None,
            along_rows=c.horizontal_only,
        )

    @property
    def _chained(self) -> bool:
        """Whether each row is drafted from the one directly above, drafted or not, up to the end of a window."""
        return self.is_lossless and not self.config.horizontal_only

    @property
    def _horizontal_rounds(self) -> int:
        c = self.config
        return (c.rounds if c.horizontal_rounds is None else c.horizontal_rounds) or 0

    def _finality(self) -> FinalityRule:
        c = self.config
        if self.is_lossless:
            return FinalityRule()
        rounds = self._horizontal_rounds if c.horizontal_only else c.rounds
        return FinalityRule(self._horizontal_rounds, rounds, c.adaptive, c.confidence_threshold)

    def _lookahead(self) -> LookaheadWindow | LookaheadSegments:
        c = self.config
        if self._chained:
            return LookaheadWindow(c.window)
        return LookaheadSegments(
            c.horizontal_block,
            c.block_size,
            c.horizontal_only,
            first_row_lag=self._horizontal_rounds,
            lag=(c.rounds or 0) if c.row_lag is None else c.row_lag,
            window=LookaheadWindow(c.window) if self.is_lossless else None,
        )

    def _refresh(self) -> Refresh:
        c = self.config
        return Refresh(
            c.refresh,
            c.coupling,
            greedy=c.draft == "argmax",
            with_drafts=self._chained,
            new_drafts=c.draft in ("sample", "argmax") and not c.horizontal_only,
        )

    def _merged_passes_left(self, state: DecodingState) -> int:
        """The rounds of what is drafted, and those of each segment to come; single tokens may take more."""
        exact, finality, lookahead = super().passes_left(state), self._finality(), self._lookahead()
        if finality.exact_only or isinstance(lookahead, LookaheadWindow):
            return exact
        grid, drafted, left = state.grid, int(state.drafted.min()), int(state.passes == 0)
        if int(state.settled.min()) < drafted:
            needed = finality.rounds_needed(max(drafted - 1, 0) // grid.stride) or 1
            left += max(1, needed - min(RollingMemory.of(state).last_rounds))
        while drafted < grid.length:
            limit = finality.rounds_needed(drafted // grid.stride)
            drafted = lookahead.segment_end(grid, drafted)
            left += max(1, limit or 1)
        return min(exact, left)

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
