"""State shared by the passes of one call: the encoded prompt, the KV cache, positions and attention masks."""

from dataclasses import dataclass

import torch

from ssd_pipelines.cache import DecodingCache
from ssd_pipelines.grid import Cells, TokenGrid


@dataclass(frozen=True)
class Prompt:
    """Encoded prompts, left padded; with guidance the conditional half of the batch comes first.

    Args:
        embeddings: `(batch or 2 * batch, length, hidden_size)`.
        attention_mask: `int64` of shape `(batch or 2 * batch, length)`, 0 where a row is padded.
        guided: whether the second half of the batch is the unconditional branch.
        grid: of the picture, for families whose prompt format can contain its size.
    """

    embeddings: torch.Tensor
    attention_mask: torch.Tensor
    guided: bool
    grid: TokenGrid | None = None

    @property
    def length(self) -> int:
        """Prompt positions per row, padding included."""
        return self.embeddings.shape[1]


class Context:
    """Cache, position ids and attention masks of one call.

    Sequence position s of picture b has cache slot `prompt.length + s`. Its rotary position is the number of unpadded
    prompt tokens plus s, or with `absolute_positions` the cache slot.

    Args:
        prompt: the encoded prompts.
        cache: the KV cache.
        grid: of the picture.
        absolute_positions: whether position ids also count the padding before a prompt.
    """

    def __init__(self, prompt: Prompt, cache: DecodingCache, grid: TokenGrid, absolute_positions: bool = False) -> None:
        self.cache = cache
        self.prompt_length = prompt.length
        mask = prompt.attention_mask
        # The model's mask has to cover the past and the window in every pass. A shorter one is silently accepted, but
        # gives wrong logits. So one mask for the whole picture is created here and sliced.
        image_positions = mask.new_ones(mask.shape[0], grid.length)
        counted = torch.cat([mask, image_positions], dim=1)
        counted = torch.ones_like(counted) if absolute_positions else counted
        self.positions = counted.cumsum(-1).sub_(1).clamp_min_(0)
        self.attention_mask = torch.cat([mask, image_positions], dim=1) if bool((mask == 0).any()) else None
        self._prompt_mask = mask.bool()

    def slots(self, cells: Cells) -> torch.Tensor:
        """Cache slots of a window, `int64 (batch or 2 * batch, n)`, for both branches with guidance."""
        return self._both_branches(cells.positions) + self.prompt_length

    def mask(self, cells: Cells, embeddings: torch.Tensor) -> torch.Tensor:
        """The additive attention mask of a window, `(batch or 2 * batch, 1, n, cache length)`.

        Args:
            cells: the window.
            embeddings: of the window; the mask has their dtype and device.
        """
        visible = cells.visible
        if visible is None:
            visible = torch.arange(cells.stop, device=embeddings.device) <= cells.positions[..., None]
        visible = self._both_branches(visible)
        prompt = self._prompt_mask[:, None, :].expand(-1, visible.shape[1], -1)
        seen = torch.cat([prompt, visible], dim=2)[:, None]
        return torch.zeros(seen.shape, dtype=embeddings.dtype, device=embeddings.device).masked_fill_(
            ~seen, torch.finfo(embeddings.dtype).min
        )

    def _both_branches(self, rows: torch.Tensor) -> torch.Tensor:
        times = self._prompt_mask.shape[0] // rows.shape[0]
        return rows if times == 1 else torch.cat([rows] * times)
