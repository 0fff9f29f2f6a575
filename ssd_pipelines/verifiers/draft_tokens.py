"""Draft tokens: how they are drawn from logits, written into the sequence, and remembered."""

import torch

from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.sampling import draw_coupled, likeliest, sample, shape
from ssd_pipelines.verifiers.state import DecodingState
from ssd_pipelines.verifiers.window import RollingMemory


def write_drafts(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    span: tuple[int, int],
    logits: torch.Tensor,
    offset: torch.Tensor | int | None,
    coupling: str,
    greedy: torch.Tensor | bool = False,
    where: torch.Tensor | None = None,
) -> None:
    """Draw draft tokens from logits and write them into the sequence.

    Args:
        pictures: `int64 (n,)`, indices within the batch.
        positions: `int64 (n, k)`, ascending; a picture that has fewer than others repeats its last one.
        span: the smallest position, and one more than the largest. The caller knows them; reading them from the device
            would make the host wait.
        logits: `float32 (n, k, vocabulary)`, guided but not filtered.
        offset: distance of each from its source, `int64 (n, k)` or one number, for statistics; `None` leaves what is
            there.
        coupling: "gumbel" draws with the call's Gumbel noise, anything else with fresh uniforms.
        greedy: take the likeliest code, everywhere or where this `bool (n, k)` says so. Never where the logits are the
            backbone's own: such a token may be final.
        where: `bool (n, k)`: which of them to write; random numbers are drawn for all.
    """
    if coupling == "gumbel":
        noise = state.random.noise(logits.shape[-1]).at(pictures, positions, *span)
        tokens = draw_coupled(logits, noise, state.sampling)
    else:
        q = shape(logits, state.sampling)
        # A repeated position takes the number of the one that it repeats.
        order = (positions[:, 1:] != positions[:, :-1]).long().cumsum(1)
        order = torch.nn.functional.pad(order, (1, 0))
        counts = [0] * state.batch_size
        for b, last in zip(pictures.tolist(), order[:, -1].tolist(), strict=True):
            counts[b] = last + 1
        uniforms = state.random.ragged_uniforms(1, [0] * state.batch_size, counts)[0][pictures]
        tokens = sample(q, uniforms.gather(1, order))
        RollingMemory.of(state).proposals.add(pictures, positions, q, where)
    if greedy is not False:
        chosen = torch.as_tensor(greedy, device=tokens.device)
        tokens = torch.where(chosen, likeliest(logits), tokens)
    rows = pictures[:, None]
    if where is not None:
        tokens = torch.where(where, tokens, state.sequence[rows, positions])
    state.sequence[rows, positions] = tokens
    if offset is not None:
        RollingMemory.of(state).offset[rows, positions] = offset


def write_drafts_without_heads(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    span: tuple[int, int],
    kind: str,
    vocabulary: int,
    coupling: str,
) -> None:
    """Draft "random" codes, or copies of the code to the "left" or "above".

    Where there is no such neighbour, the other one is copied: to the left in the first row, above in the first column.

    Args:
        pictures, positions, span, coupling: as in `write_drafts`; no position may be a row end.
        vocabulary: number of image codes.
    """
    stride = state.grid.stride
    logits = torch.zeros(*positions.shape, vocabulary, device=pictures.device)
    if kind != "random":
        copies = []
        for at in positions.unbind(1):
            above = (at >= stride) & ((at % stride == 0) | (kind == "above"))
            source = torch.where(above, at - stride, at - 1)
            copies.append(state.sequence[pictures, source])
            state.sequence[pictures, at] = copies[-1]  # the next position may copy this one
        logits.fill_(-torch.inf).scatter_(2, torch.stack(copies, dim=1)[..., None], 0.0)
    write_drafts(state, pictures, positions, span, logits, 1, coupling)


def cells_between(grid: TokenGrid, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """The positions of all cells from `starts` to `stops`, row ends left out.

    Args:
        starts, stops: `int64 (n,)`, with at least one cell between them.

    Returns:
        `int64 (n, k)`, ascending; a picture that has fewer than others repeats its last one.
    """
    if not grid.row_end:
        return torch.minimum(starts[:, None] + torch.arange(int((stops - starts).max())), stops[:, None] - 1)
    first, after = (
        at // grid.stride * grid.columns + (at % grid.stride).clamp_max(grid.columns) for at in (starts, stops)
    )
    counts = after - first
    number = first[:, None] + torch.minimum(torch.arange(int(counts.max())), counts[:, None] - 1)
    return number // grid.columns * grid.stride + number % grid.columns
