"""The paper's schedule: all passes of a picture, planned before the first one.

A block of draft tokens takes its verification rounds, and then a pass that writes its final tokens to the cache.

Source: arXiv 2606.20543, sections 3.2 and 3.3, appendix A.3 (the staged schedule). The counts that come out are the
paper's: 34, 57 and 80 passes for Janus-Pro (24 x 24) with 0, 1 and 2 rounds.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ssd_pipelines.grid import Direction, TokenGrid
from ssd_pipelines.pipeline_output import AcceptanceKey
from ssd_pipelines.sampling import accept_or_resample, draw_coupled, likeliest, sample, shape
from ssd_pipelines.verifiers.predictions import predict_offsets
from ssd_pipelines.verifiers.state import Coupling, DecodingState, Memory


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
    """For statistics: which heads drafted the positions of `verify`, and how many rows down these begin."""
    block_start: int = 0
    """Where the block begins that `verify` belongs to."""


@dataclass
class StagedMemory(Memory):
    """What a call remembers between planned passes.

    Attributes:
        proposals: with residual coupling, the distribution that each position of the block was last drawn from,
            `float32 (batch, n, vocabulary)`.
    """

    proposals: torch.Tensor


@lru_cache(maxsize=32)
def plan(
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
            passes.append(Pass((fed, block.stop), verify=block, round=number, block_start=block.start))
        passes.append(Pass(window=(fed, block.stop), commits=True))
        fed = block.stop


def _plan_vertical(
    passes: list[Pass], grid: TokenGrid, first_row: int, num_rows: int, rounds: int, trailing_rounds: int
) -> None:
    """Append the rounds of a block of rows, then the commits of its rows with trailing rounds between them."""
    block = grid.row_slice(first_row, num_rows)
    for number in range(1, rounds + 1):
        window = (block.start, block.stop)
        passes.append(Pass(window, verify=block, round=number, drafted_by=("vertical", 0), block_start=block.start))
    for index in range(num_rows):
        row = grid.row_slice(first_row + index)
        window = (row.start, row.stop)
        for number in range(rounds + 1, rounds + trailing_rounds + 1) if index else ():
            passes.append(
                Pass(window, verify=row, round=number, drafted_by=("vertical", index), block_start=block.start)
            )
        passes.append(Pass(window, commits=True))


def make_pass(state: DecodingState, planned: Pass, draft: str, coupling: Coupling) -> None:
    """What follows a planned pass: correct, commit, draw and draft, as far as planned.

    Args:
        draft: "sample" or "argmax" of what the heads predict.
    """
    if planned.verify is not None:
        with state.clock.phase("correction"):
            _correct(state, planned, planned.verify, coupling)
    if planned.commits:
        state.committed = state.settled = state.everywhere(planned.window[1])
    if planned.draws is not None:
        with state.clock.phase("correction"):
            state.draw(planned.draws, planned.draws + 1, coupling)
        state.settled = state.everywhere(planned.draws + 1)
    if planned.draft is not None:
        with state.clock.phase("drafting"):
            _draft(state, planned.draft, draft, coupling)


def _correct(state: DecodingState, planned: Pass, verify: slice, coupling: Coupling) -> None:
    """Resample every code of `verify` at its own position (section 3.3)."""
    grid = state.grid
    start, stop = verify.start, verify.stop
    # Row ends are forced: they are fed, but neither corrected nor counted.
    cells = grid.is_code(start, stop, state.sequence.device).nonzero().squeeze(-1) if grid.row_end else slice(None)
    logits = state.logits(start, stop)[:, cells]
    drafts = state.sequence[:, start:stop][:, cells]
    if coupling == "gumbel":
        noise = state.random.noise(logits.shape[-1]).between(start, stop)[:, cells]
        tokens = draw_coupled(logits, noise, state.sampling)
        accepted = tokens == drafts
    else:
        p, proposals = shape(logits, state.sampling), StagedMemory.of(state).proposals
        q = proposals[:, start - planned.block_start : stop - planned.block_start][:, cells]
        tokens, accepted = accept_or_resample(drafts, p, q, state.random.uniforms(2, drafts.shape[1]).transpose(0, 1))
        # Kept or resampled, a token now follows p: that is what the next round has to compare with.
        proposals[:, start - planned.block_start : stop - planned.block_start][:, cells] = p
    state.sequence[:, start:stop][:, cells] = tokens
    _count(state, planned, accepted)


def _draft(state: DecodingState, draft: Draft, kind: str, coupling: Coupling) -> None:
    """Draw draft tokens from the states that the heads predict."""
    source, target, stride, columns = draft.source, draft.target, state.grid.stride, state.grid.columns
    predicted = predict_offsets(state, draft.direction, source.start, source.stop, draft.num_offsets)
    logits = state.head(predicted.flatten(1, 2))
    if draft.direction == "vertical":
        # `columns` draft tokens go to a row of `stride` positions; the logits at a row end are never used.
        rows = logits.unflatten(1, (-1, columns))
        logits = torch.nn.functional.pad(rows, (0, 0, 0, stride - columns)).flatten(1, 2)
    if coupling == "residual":
        state.memory = StagedMemory(shape(logits, state.sampling))
    if kind == "argmax":
        tokens = likeliest(logits)
    elif coupling == "gumbel":
        noise = state.random.noise(logits.shape[-1]).between(target.start, target.stop)
        tokens = draw_coupled(logits, noise, state.sampling)
    else:
        tokens = sample(StagedMemory.of(state).proposals, state.random.uniforms(logits.shape[1]))
    state.drafted = state.everywhere(target.stop)
    is_code = state.grid.is_code(target.start, target.stop, tokens.device)
    state.sequence[:, target] = torch.where(is_code, tokens, state.sequence[:, target])


def _count(state: DecodingState, planned: Pass, accepted: torch.Tensor) -> None:
    direction, first_row = planned.drafted_by
    groups = accepted.split(1 if direction == "horizontal" else state.grid.columns, dim=1)
    for offset, group in enumerate(groups, start=first_row + 1):
        state.stats.record_acceptance(AcceptanceKey(direction, offset, planned.round), group)
