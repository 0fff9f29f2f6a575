"""Writing drafts down: how they are drawn, and what a decoder has to remember of that."""

import torch

from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.sampling import draw_coupled, likeliest, sample, shape
from ssd_pipelines.verifiers.base import DecodingState


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
    """Draw drafts from logits and write them down.

    Args:
        positions: `int64 (k,)`, ascending, the same for all of `pictures` `(n,)`; or `(n, k)`, where a picture that has
            fewer than others repeats its last one.
        span: the least position, and one more than the largest, for the host not to have to ask.
        logits: `(n, k, vocabulary)`, guided but not filtered.
        offset: how far from their source they lie, for statistics; `None` leaves it as it is.
        greedy: take the likeliest code, everywhere or where this `bool (k,)` or `(n, k)` says so. Never of what the
            backbone itself predicts, which may be final.
        where: `bool (n, k)`: which of them to write; numbers are drawn for all.
    """
    positions = positions.expand(len(pictures), -1)
    if coupling == "gumbel":
        noise = state.noise(logits.shape[-1]).at(pictures, positions, *span)
        tokens = draw_coupled(logits, noise, state.sampling)
    else:
        q = shape(logits, state.sampling)
        # A repeated position takes the number of the one that it repeats.
        order = (positions[:, 1:] != positions[:, :-1]).long().cumsum(1)
        order = torch.nn.functional.pad(order, (1, 0))
        counts = [0] * state.batch_size
        for b, last in zip(pictures.tolist(), order[:, -1].tolist(), strict=True):
            counts[b] = last + 1
        uniforms = state.ragged_uniforms(1, [0] * state.batch_size, counts)[0][pictures]
        tokens = sample(q, uniforms.gather(1, order))
        _remember(state, pictures, positions, q, where)
    if greedy is not False:
        chosen = torch.as_tensor(greedy, device=tokens.device)
        tokens = torch.where(chosen, likeliest(logits), tokens)
    rows = pictures[:, None]
    if where is not None:
        tokens = torch.where(where, tokens, state.sequence[rows, positions])
    state.sequence[rows, positions] = tokens
    if offset is not None:
        state.memory.offset[rows, positions] = offset


def write_guesses(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    span: tuple[int, int],
    kind: str,
    vocabulary: int,
    coupling: str,
) -> None:
    """Draft without heads: "random" codes, or a repetition of the code to the "left" or "above".

    Args:
        positions, span: as in `write_drafts`; cells only.
    """
    stride = state.grid.stride
    positions = positions.expand(len(pictures), -1)
    logits = torch.zeros(*positions.shape, vocabulary, device=pictures.device)
    if kind != "random":
        guesses = []
        for at in positions.unbind(1):
            above = (at >= stride) & ((at % stride == 0) | (kind == "above"))
            source = torch.where(above, at - stride, at - 1)
            guesses.append(state.sequence[pictures, source])
            state.sequence[pictures, at] = guesses[-1]  # the next guess may repeat this one
        logits.fill_(-torch.inf).scatter_(2, torch.stack(guesses, dim=1)[..., None], 0.0)
    write_drafts(state, pictures, positions, span, logits, 1, coupling)


def cells_between(grid: TokenGrid, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """The positions of the cells from `starts` to `stops` `(n,)`, at least one each: `int64 (n, k)`.

    A picture that has fewer than others repeats its last one.
    """
    if not grid.row_end:
        return torch.minimum(starts[:, None] + torch.arange(int((stops - starts).max())), stops[:, None] - 1)
    first, after = (
        at // grid.stride * grid.columns + (at % grid.stride).clamp_max(grid.columns) for at in (starts, stops)
    )
    counts = after - first
    number = first[:, None] + torch.minimum(torch.arange(int(counts.max())), counts[:, None] - 1)
    return number // grid.columns * grid.stride + number % grid.columns


def _remember(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    q: torch.Tensor,
    where: torch.Tensor | None,
) -> None:
    """Keep what drafts were drawn from; row ends in between were drawn from nothing."""
    memory = state.memory
    if not memory.proposals:
        memory.proposals = [q.new_zeros((0, q.shape[-1])) for _ in range(state.batch_size)]
    written = torch.ones_like(positions, dtype=torch.bool) if where is None else where
    for b, at, row, mask in zip(pictures.tolist(), positions, q, written, strict=True):
        known, begin = memory.proposals[b], memory.proposal_start[b]
        grown = known.new_zeros((max(len(known), int(at[-1]) + 1 - begin), known.shape[-1]))
        grown[: len(known)] = known
        grown[at[mask] - begin] = row[mask]
        memory.proposals[b] = grown
