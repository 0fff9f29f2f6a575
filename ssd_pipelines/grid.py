"""The token grid of a picture, and its two coordinate systems.

*Grid* coordinates name a cell by `row` and `column`; there are `rows * columns` of them and each holds one image code.
*Sequence* coordinates name a position along the raster as the backbone sees it. They differ where a family forces a
row-end token after every row (Lumina-mGPT, Emu3): such a position has no cell, but it has its place in the cache.
Everything about one system is called `codes`, everything about the other `sequence`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


ROW_END = -1
"""What a forced row-end position holds in a sequence; the backbone adapter knows which token it stands for."""

UNDRAWN = -2
"""What a cell holds before anything has been drawn or drafted for it."""

Direction = Literal["horizontal", "vertical"]
"""Where a draft lies from its source: to the right in the same row, or below in the same column."""


@dataclass(frozen=True)
class TokenGrid:
    """`rows` x `columns` image codes, each row followed by a forced row-end token if `row_end`.

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
            raise ValueError(f"A token grid has at least one row and one column, got {self.rows} x {self.columns}.")

    @property
    def stride(self) -> int:
        """Sequence positions a row: how far "directly below" lies ahead in the sequence."""
        return self.columns + int(self.row_end)

    @property
    def length(self) -> int:
        """Sequence positions of the whole picture, forced row ends included."""
        return self.rows * self.stride

    def sequence_index(self, row: int, column: int) -> int:
        """The sequence position of a cell."""
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise IndexError(f"Cell ({row}, {column}) lies outside the {self.rows} x {self.columns} token grid.")
        return row * self.stride + column

    def row_slice(self, row: int, num_rows: int = 1) -> slice:
        """The sequence positions of `num_rows` whole rows from `row` on, their row ends included."""
        return slice(row * self.stride, (row + num_rows) * self.stride)

    def is_code(self, start: int, stop: int, device: torch.device | str | None = None) -> torch.Tensor:
        """`bool` tensor of shape `(stop - start,)`: which of the sequence positions hold an image code."""
        positions = torch.arange(start, stop, device=device)
        return positions % self.stride < self.columns

    def empty_sequence(self, batch_size: int, device: torch.device | str | None = None) -> torch.Tensor:
        """`int64` tensor `(batch_size, length)`: row ends where they are forced, `UNDRAWN` everywhere else."""
        sequence = torch.full((batch_size, self.rows, self.stride), UNDRAWN, dtype=torch.long, device=device)
        sequence[:, :, self.columns :] = ROW_END
        return sequence.flatten(1)

    def to_codes(self, sequence: torch.Tensor) -> torch.Tensor:
        """Drop the row ends: `(batch, length)` -> `(batch, rows, columns)`. A view, so writing to it writes through."""
        return sequence.unflatten(1, (self.rows, self.stride))[:, :, : self.columns]


class Span(NamedTuple):
    """A window of sequence positions `start` to `stop` (exclusive), the same for all pictures of a batch."""

    start: int
    stop: int


class Cells:
    """A window of any sequence positions, each picture's own.

    Pictures that feed fewer positions than others repeat one of theirs: the same token at the same place writes the
    same keys and values.

    Args:
        positions: `int64 (batch, n)`.
        start, stop: the smallest of them, and one more than the largest.
        visible: `bool (batch, n, stop)`: which positions each may attend to, itself and others of the window among
            them; by default all up to its own.
    """

    def __init__(self, positions: torch.Tensor, start: int, stop: int, visible: torch.Tensor | None = None) -> None:
        self.positions = positions
        self.start, self.stop = start, stop
        self.visible = visible


Window = Span | Cells
"""What one pass feeds."""
