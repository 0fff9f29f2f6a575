"""What draft heads learn from, and how far they are off: states on the grid, pairs of cells, losses and figures.

Source: arXiv 2606.20543, appendix A.1: mean Smooth-L1 between predicted and true pre-norm states. The divergence of the
drafts' distribution and the share of stale states are ours.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate import Accelerator
from torch import nn

from ssd_pipelines.backbones import Backbone, Prompt
from ssd_pipelines.grid import Direction, TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.heads.layers import with_neighbors
from ssd_pipelines.training.config import HeadTrainingConfig
from ssd_pipelines.training.distillation import TokenGrids


HeadKind = Literal["horizontal", "vertical", "row"]
HeadName = tuple[HeadKind, int]

STALE_CODES = 0.5
"""In a picture of stale states, the share of codes that are drawn anew before the backbone reads it."""


@dataclass(frozen=True)
class States:
    """What the backbone went through on a batch of pictures, laid out on the grid.

    Args:
        hidden: `(batch, rows, columns, hidden_size)`, the pre-norm state that predicts each cell.
        embeddings: same shape, the embedding of each cell's token.
        codes: `int64 (batch, rows, columns)`.
        met: like `hidden`, but as a head meets it: for some pictures computed beside drafts.
    """

    hidden: torch.Tensor
    embeddings: torch.Tensor
    codes: torch.Tensor
    met: torch.Tensor


@torch.no_grad()
def backbone_states(
    backbone: Backbone, grid: TokenGrid, codes: torch.Tensor, prompts: list[str], unconditional: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and embeddings of finished pictures, in one pass over prompt and codes.

    Args:
        codes: `int64 (batch, rows, columns)`.
        unconditional: `bool (batch,)`: which pictures are read behind the unconditional prompt.

    Returns:
        both `(batch, rows, columns, hidden_size)`, see [`States`].
    """
    both = backbone.encode_prompt(prompts, None, guided=True)
    rows = torch.arange(len(prompts), device=codes.device) + len(prompts) * unconditional
    prompt = Prompt(both.embeddings[rows], both.attention_mask[rows], guided=False)
    return backbone.read(codes, prompt, grid)


class StateReader:
    """States of the pictures of a data set, computed when they are asked for: stored ones would fill terabytes."""

    def __init__(self, backbone: Backbone, grid: TokenGrid, data: TokenGrids) -> None:
        self.backbone = backbone
        self.grid = grid
        self.data = data

    def read(self, indices: list[int], unconditional: torch.Tensor, stale: torch.Tensor) -> States:
        """States of some pictures.

        Args:
            unconditional, stale: `bool (len(indices),)`, by picture.
        """
        device = self.backbone.device
        codes = self.data.codes[indices].to(device)
        hidden, embeddings = self.states(indices, codes, unconditional.to(device))
        met = hidden
        if bool(stale.any()):
            met = hidden.clone()
            chosen = stale.nonzero()[:, 0]
            some = [indices[k] for k in chosen.tolist()]
            drafted = self._with_drafts(some, codes[chosen.to(device)], hidden[chosen.to(device)])
            met[chosen.to(device)] = self.states(some, drafted, unconditional[chosen].to(device))[0]
        return States(hidden, embeddings, codes, met)

    def states(
        self, indices: list[int], codes: torch.Tensor, unconditional: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prompts = [self.data.prompts[index] for index in indices]
        return backbone_states(self.backbone, self.grid, codes, prompts, unconditional)

    @torch.no_grad()
    def _with_drafts(self, indices: list[int], codes: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Pictures some of whose codes are drawn anew, each from its own prediction: likely, but not what came."""
        drawn = []
        for index, picture, states in zip(indices, codes, hidden, strict=True):
            # Of its own generator, so that neither batches nor processes matter; on the CPU, the same everywhere.
            generator = torch.Generator().manual_seed(index)
            chances = self.backbone.logits(states).softmax(-1).flatten(0, 1).cpu()
            other = torch.multinomial(chances, 1, generator=generator).view(picture.shape).to(picture.device)
            chosen = torch.rand(picture.shape, generator=generator) < STALE_CODES
            drawn.append(torch.where(chosen.to(picture.device), other, picture))
        return torch.stack(drawn)


def offset_pairs(cells: torch.Tensor, direction: Direction, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets of a head: every cell that has another `offset` to its right, or below it.

    Args:
        cells: `(batch, rows, columns, ...)`.

    Returns:
        two views of the same shape; entry (b, r, c) of the second lies `offset` away from that of the first. No pair
        crosses the end of a row.
    """
    if direction == "horizontal":
        return cells[:, :, :-offset], cells[:, :, offset:]
    return cells[:, :-offset], cells[:, offset:]


def targets(cells: torch.Tensor, name: HeadName, horizontal_rows: int | None = None) -> torch.Tensor:
    """The cells of `(batch, rows, columns, ...)` that a head predicts, in the order of its predictions."""
    kind, offset = name
    if kind == "row":
        return cells[:, :, 1:]
    return offset_pairs(cells[:, :horizontal_rows] if kind == "horizontal" else cells, kind, offset)[1]


def predictions(
    heads: SpatialDraftHeads, states: States, horizontal_rows: int | None = None
) -> Iterator[tuple[HeadName, torch.Tensor]]:
    """What every head predicts, scaled as by `heads.predict`: `(batch, rows, columns, hidden_size)` of its targets."""
    z = heads.source_features(states.met, states.embeddings)
    around = with_neighbors(z)
    above = around if heads.config.neighborhood == "three" else z
    directions: tuple[tuple[Direction, torch.Tensor, nn.ModuleList], ...] = (
        ("horizontal", z[:, :horizontal_rows], heads.horizontal),
        ("vertical", above, heads.vertical),
    )
    for direction, features, modules in directions:
        for offset, head in enumerate(modules, start=1):
            yield (direction, offset), heads.predict(head, offset_pairs(features, direction, offset)[0])
    if heads.row is not None:
        # Every cell that has a left neighbour; above the first row there are zeros.
        above_row = nn.functional.pad(around[:, :-1, 1:], (0, 0, 0, 0, 1, 0))
        yield ("row", 1), heads.predict(heads.row, torch.cat([above_row, z[:, :, :-1]], dim=-1))


def head_names(heads: SpatialDraftHeads) -> list[HeadName]:
    """Direction and offset of every head, in the order of `predictions`."""
    names: list[HeadName] = [("horizontal", offset) for offset in range(1, len(heads.horizontal) + 1)]
    names += [("vertical", offset) for offset in range(1, len(heads.vertical) + 1)]
    return names + ([("row", 1)] if heads.row is not None else [])


@dataclass(frozen=True)
class HeadLoss:
    """Of one head: how far its predictions are from the target, and its drafts' distribution from the backbone's.

    Args:
        match: Smooth-L1 of scaled states, or the cross-entropy of tokens.
        kl: mean divergence in nats, if it was asked for.
        acceptance: mean over cells of `sum(min(p, q))`: the chance that a draft drawn from q is kept, without guidance
            and filters; if it was asked for.
    """

    match: torch.Tensor
    kl: torch.Tensor | None = None
    acceptance: torch.Tensor | None = None


def head_losses(
    heads: SpatialDraftHeads, backbone: Backbone, states: States, config: HeadTrainingConfig, measure: bool = False
) -> dict[HeadName, HeadLoss]:
    """The losses of every head, means over its cells.

    Args:
        measure: also the figures that the training doesn't need.
    """
    compares = measure or config.kl_weight > 0
    with torch.no_grad():
        log_p = backbone.logits(states.hidden).log_softmax(-1) if compares else states.hidden
        wanted = heads.to_own_states(states.hidden).float() / heads.config.hidden_scale
    losses = {}
    for name, predicted in predictions(heads, states, config.horizontal_rows):
        kl = acceptance = None
        if compares or config.target == "token":
            log_q = backbone.logits(heads.to_pre_norm(predicted).to(states.hidden.dtype)).log_softmax(-1)
        if config.target == "token":
            codes = targets(states.codes, name, config.horizontal_rows)
            match = nn.functional.nll_loss(log_q.flatten(0, -2), codes.flatten())
        else:
            match = nn.functional.smooth_l1_loss(predicted.float(), targets(wanted, name, config.horizontal_rows))
        if compares:
            own_p = targets(log_p, name, config.horizontal_rows)
            kl = nn.functional.kl_div(log_q, own_p, log_target=True, reduction="none").sum(-1).mean()
        if measure:
            acceptance = torch.minimum(own_p, log_q).exp().sum(-1).mean()
        losses[name] = HeadLoss(match, kl, acceptance)
    return losses


def total_loss(losses: dict[HeadName, HeadLoss], config: HeadTrainingConfig) -> torch.Tensor:
    """What is minimised: the mean over heads of weighted losses."""
    weights = {"horizontal": config.alpha, "vertical": config.beta, "row": 1.0}
    terms = []
    for (kind, _), loss in losses.items():
        value = loss.match if loss.kl is None else loss.match + config.kl_weight * loss.kl
        terms.append(weights[kind] * value)
    return torch.stack(terms).mean()


@torch.no_grad()
def validate_heads(
    heads: SpatialDraftHeads,
    reader: StateReader,
    indices: list[int],
    config: HeadTrainingConfig,
    accelerator: Accelerator | None = None,
) -> dict[str, dict[str, float]]:
    """Figures on pictures that were kept from training, by head, for instance "vertical+1".

    Args:
        indices: of all these pictures; with an accelerator, each process reads its share of them.

    Returns:
        by head "loss", "kl" and "expected_acceptance", see [`HeadLoss`]. All states are clean, and as many prompts
        dropped as in training.
    """
    dropped = torch.rand(len(indices), generator=torch.Generator().manual_seed(config.seed)) < config.prompt_dropout
    first, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    own = list(range(first, len(indices), processes))
    size = max(1, config.batch_size // (config.gradient_accumulation * processes))
    names = [f"{kind}+{offset}" for kind, offset in head_names(heads)]
    sums = torch.zeros(len(names), 3, dtype=torch.float64)
    for start in range(0, len(own), size):
        part = own[start : start + size]
        clean = torch.zeros(len(part), dtype=torch.bool)
        states = reader.read([indices[k] for k in part], dropped[part], clean)
        for row, loss in enumerate(head_losses(heads, reader.backbone, states, config, measure=True).values()):
            figures = [math.nan if value is None else value.item() for value in (loss.match, loss.kl, loss.acceptance)]
            sums[row] += torch.tensor(figures) * len(part) / len(indices)
    if accelerator is not None and processes > 1:
        sums = accelerator.reduce(sums.float().to(accelerator.device), reduction="sum").cpu()
    columns = ("loss", "kl", "expected_acceptance")
    return {name: dict(zip(columns, row.tolist(), strict=True)) for name, row in zip(names, sums, strict=True)}
