"""The token grid of a picture, and its two coordinate systems.

*Grid* coordinates name a cell by `row` and `column`. There are `rows * columns` cells, and each holds one image code.
*Sequence* coordinates name a position in raster order, as the backbone sees it. The two differ for model families that
force a row-end token after every row (Lumina-mGPT, Emu3): a row end is no cell, but takes a position in the KV cache.
Tensors in grid coordinates are called `codes`, those in sequence coordinates `sequence`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


ROW_END = -1
"""Placeholder for a forced row-end token in a sequence; the backbone adapter knows the actual token."""

UNDRAWN = -2
"""Placeholder for a cell that has neither a final code nor a draft token yet."""

Direction = Literal["horizontal", "vertical"]
"""Where a draft token lies relative to its source: to the right in the same row, or below in the same column."""


@dataclass(frozen=True)
class TokenGrid:
    """`rows` x `columns` image codes; each row is followed by a forced row-end token if `row_end`.

    Raises:
        ValueError: if there is no row or no column.

    Example:
        >>> grid = TokenGrid(rows=48, columns=48, row_end=True)
        >>> grid.length, grid.stride, grid.sequence_index(1, 0)
        (2352, 49, 49)
    """

    rows: int
    columns: int
    row_end: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"A token grid needs at least one row and one column, got {self.rows} x {self.columns}.")

    @property
    def stride(self) -> int:
        """Sequence positions per row, which is also the distance from a cell to the cell directly below it."""
        return self.columns + int(self.row_end)

    @property
    def length(self) -> int:
        """Number of sequence positions of the whole picture, including forced row ends."""
        return self.rows * self.stride

    def sequence_index(self, row: int, column: int) -> int:
        """The sequence position of a cell.

        Raises:
            IndexError: if the cell lies outside the grid.
        """
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise IndexError(f"Cell ({row}, {column}) lies outside the {self.rows} x {self.columns} token grid.")
        return row * self.stride + column

    def row_slice(self, row: int, num_rows: int = 1) -> slice:
        """The sequence positions of `num_rows` whole rows from `row` on, including their row ends."""
        return slice(row * self.stride, (row + num_rows) * self.stride)

    def is_code(self, start: int, stop: int, device: torch.device | str | None = None) -> torch.Tensor:
        """`bool` tensor of shape `(stop - start,)`: which of the sequence positions hold an image code."""
        positions = torch.arange(start, stop, device=device)
        return positions % self.stride < self.columns

    def empty_sequence(self, batch_size: int, device: torch.device | str | None = None) -> torch.Tensor:
        """`int64` tensor `(batch_size, length)`: `ROW_END` at forced row ends, `UNDRAWN` everywhere else."""
        sequence = torch.full((batch_size, self.rows, self.stride), UNDRAWN, dtype=torch.long, device=device)
        sequence[:, :, self.columns :] = ROW_END
        return sequence.flatten(1)

    def to_codes(self, sequence: torch.Tensor) -> torch.Tensor:
        """Drop the row ends: `(batch, length)` -> `(batch, rows, columns)`. A view, so writes change `sequence`."""
        return sequence.unflatten(1, (self.rows, self.stride))[:, :, : self.columns]


class Span(NamedTuple):
    """A window of sequence positions `start` to `stop` (exclusive), the same for all pictures of a batch."""

    start: int
    stop: int


class Cells:
    """A window of arbitrary sequence positions, chosen per picture.

    A picture that feeds fewer positions than others repeats one of its own: the same token at the same position writes
    the same keys and values.

    Args:
        positions: `int64 (batch, n)`.
        start, stop: the smallest position, and one more than the largest.
        visible: `bool (batch, n, stop)`: the positions that each one may attend to, including itself and others of the
            window; by default all up to its own.
    """

    def __init__(self, positions: torch.Tensor, start: int, stop: int, visible: torch.Tensor | None = None) -> None:
        self.positions = positions
        self.start, self.stop = start, stop
        self.visible = visible


Window = Span | Cells
"""The sequence positions that one forward pass feeds."""
