"""Predictions of single cells by the draft heads, from whatever cells around them are known."""

from functools import lru_cache

import torch

from ssd_pipelines.verifiers.base import DecodingState


ABOVE_LEFT, ABOVE, ABOVE_RIGHT, LEFT = (-1, -1), (-1, 0), (-1, 1), (0, -1)


def predict_from_neighbors(state: DecodingState, pictures: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """States of cells as the heads foresee them from the tokens around, left neighbour included.

    By the row head if there is one, else by the first horizontal head, which knows the left neighbour alone.

    Args:
        pictures: `(n,)`, indices within the batch.
        positions: `int64 (n, k)`, sequence positions; those in the first column of a row get what no one should use.

    Returns:
        `(n or 2 n, k, hidden_size)`.
    """
    heads = state.heads
    assert heads is not None
    if heads.row is None:
        left = _features(state, pictures, (positions - 1).clamp_min(0))
        predicted = heads.to_pre_norm(heads.predict(heads.horizontal[0], left))
    else:
        around = _features_around(state, pictures, positions, (ABOVE_LEFT, ABOVE, ABOVE_RIGHT, LEFT))
        predicted = heads.predict_cells(around[..., :3, :], around[..., 3, :])
    return predicted.to(state.states(0, 1).dtype)


def predict_along(
    state: DecodingState, pictures: torch.Tensor, source: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """States of cells as the horizontal heads foresee them from one cell to the left of all.

    Args:
        source: `int64 (n, 1)`.
        offsets: `int64 (n, k)`, from 1 to the number of horizontal heads.

    Returns:
        `(n or 2 n, k, hidden_size)`.
    """
    assert state.heads is not None
    embeddings = state.embed(state.sequence[pictures[:, None], source])
    count = offsets.shape[1]
    predicted = state.heads(state.states_at(pictures, source), embeddings, "horizontal", count).squeeze(2)
    which = offsets if len(offsets) == len(predicted) else torch.cat([offsets, offsets])
    return predicted.gather(1, (which - 1)[..., None].expand(-1, -1, predicted.shape[-1]))


def predict_from_above(state: DecodingState, above: torch.Tensor) -> torch.Tensor:
    """States of cells as the first vertical head foresees them from the row above.

    Args:
        above: `features_above` of the cells.

    Returns:
        `(n or 2 n, k, hidden_size)`.
    """
    heads = state.heads
    assert heads is not None
    z = above.flatten(-2) if heads.config.neighborhood == "three" else above[..., 1, :]
    return heads.to_pre_norm(heads.predict(heads.vertical[0], z)).to(state.states(0, 1).dtype)


def features_above(
    state: DecodingState, pictures: torch.Tensor, positions: torch.Tensor, known: torch.Tensor | None = None
) -> torch.Tensor:
    """What the heads see of the cells above left, above, and above right of some cells.

    Args:
        known: `bool (batch, length)`: which cells exist; neighbours that don't count as if the grid ended there.

    Returns:
        `(n or 2 n, k, 3, features)`; zeros where there is none.
    """
    return _features_around(state, pictures, positions, (ABOVE_LEFT, ABOVE, ABOVE_RIGHT), known)


def _features_around(
    state: DecodingState,
    pictures: torch.Tensor,
    positions: torch.Tensor,
    neighbors: tuple[tuple[int, int], ...],
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the heads see of some neighbours of cells, `(n or 2 n, k, neighbours, features)`; zeros where there is none.

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
    """Rows down and columns to the right, kept where they are needed: sending them there makes the host wait."""
    down, right = torch.tensor(neighbors, device=device).T
    return down, right


def _features(state: DecodingState, pictures: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """What the heads see of the cells at positions `(n, ...)`: `(n or 2 n, ..., features)`."""
    assert state.heads is not None
    flat = at.flatten(1)
    tokens = state.sequence[pictures[:, None], flat].clamp_min(0)  # what isn't drawn is masked by the caller
    return state.heads.source_features(state.states_at(pictures, flat), state.embed(tokens)).unflatten(1, at.shape[1:])
