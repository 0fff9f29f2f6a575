"""Spatially speculative decoding: draft along the first row, then whole rows, and correct them in parallel.

Source: arXiv 2606.20543, sections 3.2 and 3.3, appendix A.3 (the staged schedule) and table 9 (settings).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from diffusers.configuration_utils import register_to_config

from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import Direction, SpatialDraftHeads
from ssd_pipelines.pipeline_output import AcceptanceKey
from ssd_pipelines.sampling import accept_or_resample, sample, shape
from ssd_pipelines.verifiers.base import DecodingState, Verifier


@dataclass(frozen=True)
class Draft:
    """Drafting from final tokens: `num_offsets` cells to the right of one, or rows below one."""

    direction: Direction
    source: slice
    num_offsets: int
    target: slice


@dataclass(frozen=True)
class Pass:
    """One planned pass and what to do with its predictions, in this order."""

    window: tuple[int, int]
    verify: slice | None = None
    """Correct these positions; the rest of the window is final already."""
    round: int = 0
    commits: bool = False
    """Keep the window in the cache: its tokens are final."""
    draws: int | None = None
    """Draw this position from the backbone, as autoregressive decoding would."""
    draft: Draft | None = None
    drafted_by: tuple[Direction, int] = ("horizontal", 0)
    """For statistics: which heads drafted what is verified, and how many rows down."""


class SpatialDraftVerifier(Verifier):
    """Drafts with horizontal heads in the first row and with vertical heads below it, and corrects as it goes.

    Blocks take turns of `rounds` passes that correct them and one that commits them. In a round every position of the
    block is kept with probability `min(1, p/q)` or drawn anew from `max(0, p - q)`, each by itself, all at once: p is
    the backbone's distribution given the block as it stood, q what the token was last drawn from. Finitely many
    rounds are not exact: later positions of a block were judged beside earlier ones that changed in the same round.

    The pass counts are the paper's: 34, 57 and 80 for Janus-Pro (24 x 24) with 0, 1 and 2 rounds.

    Args:
        block_size: rows that are drafted together; the heads need as many vertical offsets.
        rounds: correction rounds of a block of rows, all of its rows at once (b in the paper).
        trailing_rounds: further rounds of each row of a block after the row above it was committed (i in the paper's
            staged schedule); 0 is the joint schedule.
        horizontal_block: tokens that are drafted together in the first row.
        horizontal_rounds: correction rounds of such a block.
        horizontal_only: draft every row like the first, the paper's 1D multi-token prediction baseline.
        draft: "argmax" takes the heads' likeliest token, as the paper does, which favours likely tokens beyond their
            probability; "sample" draws from the heads' distribution, which makes a single round exact for the first
            position of a block.
        temperature, top_k, top_p: sampling settings for backbone and drafts alike; `None` takes the backbone's
            recommended ones.

    Source: arXiv 2606.20543. Its settings are rounds 2 for Janus-Pro; block size 2, rounds 5, trailing rounds 4 for
    Lumina-mGPT; rounds 6 for Emu3.
    """

    needs_heads = True

    @register_to_config
    def __init__(
        self,
        block_size: int = 1,
        rounds: int = 2,
        trailing_rounds: int = 0,
        horizontal_block: int = 5,
        horizontal_rounds: int = 1,
        horizontal_only: bool = False,
        draft: Literal["sample", "argmax"] = "sample",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("rounds", rounds, 0),
            ("trailing_rounds", trailing_rounds, 0),
            ("horizontal_block", horizontal_block, 1),
            ("horizontal_rounds", horizontal_rounds, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
        if draft not in ("sample", "argmax"):
            raise ValueError(f'`draft` must be "sample" or "argmax", got {draft!r}.')

    def history(self, grid: TokenGrid) -> int:
        return grid.stride

    def check(self, grid: TokenGrid, heads: SpatialDraftHeads | None) -> None:
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

    def next_window(self, state: DecodingState) -> tuple[int, int] | None:
        schedule = self._schedule(state)
        return schedule[state.passes].window if state.passes < len(schedule) else None

    def passes_left(self, state: DecodingState) -> int:
        return len(self._schedule(state)) - state.passes

    def step(self, state: DecodingState) -> None:
        planned = self._schedule(state)[state.passes]
        state.corrected.zero_()
        if planned.verify is not None:
            with state.clock.phase("correction"):
                self._correct(state, planned, planned.verify)
        if planned.commits:
            state.committed = state.settled = planned.window[1]
        if planned.draws is not None:
            with state.clock.phase("correction"):
                state.draw(planned.draws, planned.draws + 1)
            state.settled = planned.draws + 1
        if planned.draft is not None:
            with state.clock.phase("drafting"):
                self._draft(state, planned.draft)

    # --- the two things it does -------------------------------------------------------------------------------------

    def _correct(self, state: DecodingState, planned: Pass, verify: slice) -> None:
        """Accept or redraw every code of `verify` independently (section 3.3)."""
        grid = state.grid
        start, stop = verify.start, verify.stop
        # Row ends are forced: they are fed, but neither corrected nor counted.
        cells = grid.is_code(start, stop, state.sequence.device).nonzero().squeeze(-1) if grid.row_end else slice(None)
        p = state.distribution(start, stop)[:, cells]
        q = state.proposal[:, start - state.proposal_start : stop - state.proposal_start][:, cells]
        drafts = state.sequence[:, start:stop][:, cells]
        tokens, accepted = accept_or_resample(drafts, p, q, state.uniforms(2, drafts.shape[1]).transpose(0, 1))

        # Compared first: without row ends `drafts` is a view of the sequence.
        state.corrected[:, start:stop][:, cells] = tokens != drafts
        state.sequence[:, start:stop][:, cells] = tokens
        # Kept or redrawn, a token now follows p: that is what the next round has to compare with.
        state.proposal[:, start - state.proposal_start : stop - state.proposal_start][:, cells] = p
        self._count(state, planned, accepted)

    def _draft(self, state: DecodingState, draft: Draft) -> None:
        """Predict states with the heads, and draw drafts from what the backbone's image head makes of them."""
        source, target, stride = draft.source, draft.target, state.grid.stride
        predicted = state.draft_states(draft.direction, source.start, source.stop, draft.num_offsets)
        q = shape(state.predictions.head(predicted.flatten(1, 2)), state.sampling)
        tokens = q.argmax(-1) if self.config.draft == "argmax" else sample(q, state.uniforms(q.shape[1]))

        state.proposal_start = target.start
        state.drafted = target.stop
        if draft.direction == "horizontal":
            state.sequence[:, target] = tokens
            state.proposal = q
        else:
            # Rows of `columns` drafts go to rows of `stride` positions; what a row end was drawn from is never read.
            columns = state.grid.columns
            state.sequence[:, target].unflatten(1, (-1, stride))[:, :, :columns] = tokens.unflatten(1, (-1, columns))
            rows = q.unflatten(1, (-1, columns))
            state.proposal = torch.nn.functional.pad(rows, (0, 0, 0, stride - columns)).flatten(1, 2)

    def _count(self, state: DecodingState, planned: Pass, accepted: torch.Tensor) -> None:
        direction, first_row = planned.drafted_by
        groups = accepted.split(1 if direction == "horizontal" else state.grid.columns, dim=1)
        for offset, group in enumerate(groups, start=first_row + 1):
            state.stats.record_acceptance(AcceptanceKey(direction, offset, planned.round), group)

    # --- the plan ---------------------------------------------------------------------------------------------------

    def _schedule(self, state: DecodingState) -> tuple[Pass, ...]:
        c = self.config
        return _plan(
            state.grid,
            state.start_row,
            c.block_size,
            c.rounds,
            c.trailing_rounds,
            c.horizontal_block,
            c.horizontal_rounds,
            c.horizontal_only,
        )


@lru_cache(maxsize=32)
def _plan(
    grid: TokenGrid,
    start_row: int,
    block_size: int,
    rounds: int,
    trailing_rounds: int,
    horizontal_block: int,
    horizontal_rounds: int,
    horizontal_only: bool,
) -> tuple[Pass, ...]:
    """All passes of a picture whose first `start_row` rows are given."""
    start = start_row * grid.stride
    if start == grid.length:
        return ()
    # The prompt's pass, which also commits the rows that were given.
    passes = [Pass(window=(0, start), commits=True)]

    if horizontal_only and not grid.row_end:
        runs = [slice(start, grid.length)]  # without row ends the raster is one long line
    elif horizontal_only or start_row == 0:
        last_row = grid.rows if horizontal_only else 1
        runs = [slice(row * grid.stride, row * grid.stride + grid.columns) for row in range(start_row, last_row)]
    else:
        runs = []
    for run in runs:
        passes[-1] = replace(passes[-1], draws=run.start)
        _plan_horizontal(passes, run, horizontal_block, horizontal_rounds, first=run is runs[0])
        if grid.row_end:
            passes.append(Pass(window=(run.stop, run.stop + 1), commits=True))

    if not horizontal_only:
        for row in range(max(start_row, 1), grid.rows, block_size):
            num_rows = min(block_size, grid.rows - row)
            source = slice((row - 1) * grid.stride, (row - 1) * grid.stride + grid.columns)
            draft = Draft("vertical", source, num_rows, grid.row_slice(row, num_rows))
            passes[-1] = replace(passes[-1], draft=draft)
            _plan_vertical(passes, grid, row, num_rows, rounds, trailing_rounds)
    return tuple(passes)


def _plan_horizontal(passes: list[Pass], run: slice, horizontal_block: int, rounds: int, first: bool) -> None:
    """Append the blocks of `horizontal_block` tokens after the first token of a run; `passes[-1]` drafts the first."""
    fed = run.start
    if not first or run.stop == run.start + 1:
        # The first token of a row takes an ordinary pass. In the first row that was the prompt's, and the token itself
        # is fed with the block after it; this is how the published counts come out.
        fed += 1
        passes.append(Pass(window=(run.start, fed), commits=True))
    for begin in range(run.start + 1, run.stop, horizontal_block):
        block = slice(begin, min(begin + horizontal_block, run.stop))
        draft = Draft("horizontal", slice(begin - 1, begin), block.stop - begin, block)
        passes[-1] = replace(passes[-1], draft=draft)
        for number in range(1, rounds + 1):
            passes.append(Pass(window=(fed, block.stop), verify=block, round=number))
        passes.append(Pass(window=(fed, block.stop), commits=True))
        fed = block.stop


def _plan_vertical(
    passes: list[Pass], grid: TokenGrid, first_row: int, num_rows: int, rounds: int, trailing_rounds: int
) -> None:
    """Append the rounds of a block of rows, then the commits of its rows with trailing rounds between them."""
    block = grid.row_slice(first_row, num_rows)
    for number in range(1, rounds + 1):
        passes.append(Pass((block.start, block.stop), verify=block, round=number, drafted_by=("vertical", 0)))
    for index in range(num_rows):
        row = grid.row_slice(first_row + index)
        window = (row.start, row.stop)
        for number in range(rounds + 1, rounds + trailing_rounds + 1) if index else ():
            passes.append(Pass(window, verify=row, round=number, drafted_by=("vertical", index)))
        passes.append(Pass(window, commits=True))
