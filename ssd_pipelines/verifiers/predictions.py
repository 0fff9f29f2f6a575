"""What the draft heads predict of single cells, from whatever cells around them are known.

Every function here predicts *states*: pre-norm hidden states as the backbone would give them. `DecodingState.head`
turns them into logits.
"""

from functools import lru_cache

import torch

from ssd_pipelines.grid import Direction
from ssd_pipelines.verifiers.state import DecodingState, DraftHeads


ABOVE_LEFT, ABOVE, ABOVE_RIGHT, LEFT = (-1, -1), (-1, 0), (-1, 1), (0, -1)


def draft_heads(state: DecodingState) -> DraftHeads:
    """The heads of a call.

    Raises:
        ValueError: if it has none.
    """
    if state.heads is None:
        raise ValueError("Drafting needs draft heads, and this call has none.")
    return state.heads


def predict_offsets(
    state: DecodingState, direction: Direction, start: int, stop: int, num_offsets: int
) -> torch.Tensor:
    """States at all offsets of a direction, from the same source positions in all pictures.

    Args:
        start, stop: source positions; for "vertical" whole rows of cells.

    Returns:
        `(batch or 2 * batch, num_offsets, stop - start, hidden_size)`.
    """
    embeddings = state.embed(state.sequence[:, start:stop])
    return draft_heads(state)(state.hidden.between(start, stop), embeddings, direction, num_offsets)


def predict_along(
    state: DecodingState, pictures: torch.Tensor, source: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """States of cells to the right of one source cell, by the horizontal heads.

    Args:
        pictures: `int64 (n,)`, indices within the batch.
        source: `int64 (n, 1)`, sequence positions.
        offsets: `int64 (n, k)`, from 1 to the number of horizontal heads.

    Returns:
        `(n or 2 * n, k, hidden_size)`.
    """
    embeddings = state.embed(state.sequence[pictures[:, None], source])
    count = offsets.shape[1]
    predicted = draft_heads(state)(state.hidden.at(pictures, source), embeddings, "horizontal", count).squeeze(2)
    which = offsets if len(offsets) == len(predicted) else torch.cat([offsets, offsets])
    return predicted.gather(1, (which - 1)[..., None].expand(-1, -1, predicted.shape[-1]))


def predict_from_above(state: DecodingState, above: torch.Tensor, distance: int = 1) -> torch.Tensor:
    """States of cells `distance` rows below a row of known cells, by a vertical head.

    Args:
        above: `features_above` of the cells directly below that row.

    Returns:
        `(n or 2 * n, k, hidden_size)`.
    """
    heads = draft_heads(state)
    z = above.flatten(-2) if heads.config.neighborhood == "three" else above[..., 1, :]
    return heads.to_pre_norm(heads.predict(heads.vertical[distance - 1], z)).to(state.hidden.buffer.dtype)


def predict_from_neighbors(state: DecodingState, pictures: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """States of cells from the tokens around them, the left neighbour included.

    The row head predicts them if there is one; else the first horizontal head, which sees the left neighbour alone.

    Args:
        pictures: `int64 (n,)`, indices within the batch.
        positions: `int64 (n, k)`, sequence positions. In the first column of a row, which has no left neighbour, the
            result is meaningless.

    Returns:
        `(n or 2 * n, k, hidden_size)`.
    """
    heads = draft_heads(state)
    if heads.row is None:
        left = _features(state, pictures, (positions - 1).clamp_min(0))
        predicted = heads.to_pre_norm(heads.predict(heads.horizontal[0], left))
    else:
        around = _features_around(state, pictures, positions, (ABOVE_LEFT, ABOVE, ABOVE_RIGHT, LEFT))
        predicted = heads.predict_cells(around[..., :3, :], around[..., 3, :])
    return predicted.to(state.hidden.buffer.dtype)


def features_above(
    state: DecodingState, pictures: torch.Tensor, positions: torch.Tensor, known: torch.Tensor | None = None
) -> torch.Tensor:
    """The heads' input from the cells above left, above, and above right of some cells.

    Args:
        pictures, positions: as in `predict_from_neighbors`.
        known: `bool (batch, length)`: which cells exist; a neighbour that doesn't is treated like one outside the grid.

    Returns:
        `(n or 2 * n, k, 3, features)`; zeros where there is no neighbour.
    """
    return _features_around(state, pictures, positions, (ABOVE_LEFT, ABOVE, ABOVE_RIGHT), known)


def _features_around(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    neighbors: tuple[tuple[int, int], ...],
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """The heads' input from some neighbours, `(n or 2 * n, k, neighbors, features)`; zeros where there is none.

    Args:
        neighbors: each as rows down and columns to the right.
        known: see `features_above`.
    """
    grid = state.grid
    down, right = _offsets(neighbors, positions.device)
    column = (positions % grid.stride)[..., None] + right
    at = positions[..., None] + down * grid.stride + right
    exists = (column >= 0) & (column < grid.columns) & (at >= 0)
    at = torch.where(exists, at, 0)
    if known is not None:
        exists = exists & known[pictures[:, None, None], at]
    z = _features(state, pictures, at)
    return z * (torch.cat([exists, exists]) if len(z) > len(exists) else exists)[..., None]


@lru_cache
def _offsets(neighbors: tuple[tuple[int, int], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows down and columns to the right; kept on the device, for copying them there makes the host wait."""
    down, right = torch.tensor(neighbors, device=device).T
    return down, right


def _features(state: DecodingState, pictures: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The heads' input from the cells at positions `(n, ...)`: `(n or 2 * n, ..., features)`."""
    flat = at.flatten(1)
    tokens = state.sequence[pictures[:, None], flat].clamp_min(0)  # the caller masks what is not drawn
    features = draft_heads(state).source_features(state.hidden.at(pictures, flat), state.embed(tokens))
    return features.unflatten(1, at.shape[1:])
