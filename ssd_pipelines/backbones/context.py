"""What the passes of one call share: the encoded prompt, the cache, where each position lies, and what it may see."""

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
        grid: of the picture that they ask for, where the family's format may name it.
    """

    embeddings: torch.Tensor
    attention_mask: torch.Tensor
    guided: bool
    grid: TokenGrid | None = None

    @property
    def length(self) -> int:
        return self.embeddings.shape[1]


class Context:
    """What the passes of one call share: the cache, the prompt's padding, and where each position lies.

    Sequence position s of picture b sits at cache index `prompt.length + s`, its rotary position is the number of
    unpadded prompt tokens plus s.
    """

    def __init__(self, prompt: Prompt, cache: DecodingCache, grid: TokenGrid, absolute_positions: bool = False) -> None:
        self.cache = cache
        self.prompt_length = prompt.length
        mask = prompt.attention_mask
        # The mask given to the model has to cover the past and the window at every pass: a shorter one is accepted in
        # silence and gives wrong logits. One mask for the whole picture is made here and sliced.
        image_positions = mask.new_ones(mask.shape[0], grid.length)
        counted = torch.cat([mask, image_positions], dim=1)
        counted = torch.ones_like(counted) if absolute_positions else counted
        self.positions = counted.cumsum(-1).sub_(1).clamp_min_(0)
        self.attention_mask = torch.cat([mask, image_positions], dim=1) if bool((mask == 0).any()) else None
        self._prompt_mask = mask.bool()

    def slots(self, cells: Cells) -> torch.Tensor:
        """Cache places `int64 (batch, n)` of a window, for both branches of guidance."""
        return self._both_branches(cells.positions) + self.prompt_length

    def mask(self, cells: Cells, embeddings: torch.Tensor) -> torch.Tensor:
        """The additive mask `(batch, 1, n, cache length)` of a window, in the dtype of `embeddings`."""
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
