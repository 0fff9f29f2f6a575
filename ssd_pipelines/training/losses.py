"""Training data and losses of draft heads: states on the grid, pairs of source and target cells, losses and figures.

Source: arXiv 2606.20543, appendix A.1: mean Smooth-L1 between predicted and true pre-norm states. The KL loss on draft
distributions and the share of stale states are ours.
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
"""Share of the codes of a picture that are replaced by new draws to compute its stale states."""


@dataclass(frozen=True)
class States:
    """States of the backbone for a batch of pictures, arranged on the grid.

    Args:
        hidden: `(batch, rows, columns, hidden_size)`, the pre-norm state that predicts each cell.
        embeddings: same shape, the embedding of each cell's token.
        codes: `int64 (batch, rows, columns)`.
        met: like `hidden`, but the states that the heads read: for some pictures they are stale, computed in a pass
            over draft tokens.
    """

    hidden: torch.Tensor
    embeddings: torch.Tensor
    codes: torch.Tensor
    met: torch.Tensor


@torch.no_grad()
def backbone_states(
    backbone: Backbone, grid: TokenGrid, codes: torch.Tensor, prompts: list[str], unconditional: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute states and embeddings of finished pictures, in one pass over prompt and codes.

    Args:
        backbone: the backbone.
        grid: its token grid.
        codes: `int64 (batch, rows, columns)`.
        prompts: one per picture.
        unconditional: `bool (batch,)`: pictures that are read after the unconditional prompt.

    Returns:
        both `(batch, rows, columns, hidden_size)`, see [`States`].
    """
    both = backbone.encode_prompt(prompts, None, guided=True)
    rows = torch.arange(len(prompts), device=codes.device) + len(prompts) * unconditional
    prompt = Prompt(both.embeddings[rows], both.attention_mask[rows], guided=False)
    return backbone.read(codes, prompt, grid)


class StateReader:
    """Computes states of the pictures of a data set on demand; storing them would take terabytes."""

    def __init__(self, backbone: Backbone, grid: TokenGrid, data: TokenGrids) -> None:
        self.backbone = backbone
        self.grid = grid
        self.data = data

    def read(self, indices: list[int], unconditional: torch.Tensor, stale: torch.Tensor) -> States:
        """Compute the states of some pictures.

        Args:
            indices: indices of the pictures in the data set.
            unconditional: `bool (len(indices),)`: pictures that are read after the unconditional prompt.
            stale: `bool (len(indices),)`: pictures whose `met` states are computed in a pass over draft tokens.
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
        """Compute states and embeddings of given codes with the prompts of `indices`; see `backbone_states`."""
        prompts = [self.data.prompts[index] for index in indices]
        return backbone_states(self.backbone, self.grid, codes, prompts, unconditional)

    @torch.no_grad()
    def _with_drafts(self, indices: list[int], codes: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Replace some codes of the pictures by new samples from the same predictions, like plausible wrong drafts."""
        drawn = []
        for index, picture, states in zip(indices, codes, hidden, strict=True):
            # A generator per picture makes the result independent of batches and processes, and on the CPU, of devices.
            generator = torch.Generator().manual_seed(index)
            chances = self.backbone.logits(states).softmax(-1).flatten(0, 1).cpu()
            other = torch.multinomial(chances, 1, generator=generator).view(picture.shape).to(picture.device)
            chosen = torch.rand(picture.shape, generator=generator) < STALE_CODES
            drawn.append(torch.where(chosen.to(picture.device), other, picture))
        return torch.stack(drawn)


def offset_pairs(cells: torch.Tensor, direction: Direction, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source and the target cells of a head, whose target lies `offset` cells to the right or below.

    Args:
        cells: `(batch, rows, columns, ...)`.
        direction: "horizontal" for targets to the right, "vertical" for targets below.
        offset: distance in cells.

    Returns:
        two views of the same shape; entry (b, r, c) of the second lies `offset` away from that of the first. No pair
        crosses the end of a row.
    """
    if direction == "horizontal":
        return cells[:, :, :-offset], cells[:, :, offset:]
    return cells[:, :-offset], cells[:, offset:]


def targets(cells: torch.Tensor, name: HeadName, horizontal_rows: int | None = None) -> torch.Tensor:
    """Return the target cells of a head, in the order of its `predictions`.

    Args:
        cells: `(batch, rows, columns, ...)`.
        name: kind and offset of the head.
        horizontal_rows: number of rows that horizontal heads are trained on; `None` for all.
    """
    kind, offset = name
    if kind == "row":
        return cells[:, :, 1:]
    return offset_pairs(cells[:, :horizontal_rows] if kind == "horizontal" else cells, kind, offset)[1]


def predictions(
    heads: SpatialDraftHeads, states: States, horizontal_rows: int | None = None
) -> Iterator[tuple[HeadName, torch.Tensor]]:
    """Yield the name and the predictions of every head: `(batch, rows, columns, hidden_size)` of its target cells.

    Predictions are scaled as those of `heads.predict`.
    """
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
        # Targets are all cells with a left neighbour; above the first row there are zeros.
        above_row = nn.functional.pad(around[:, :-1, 1:], (0, 0, 0, 0, 1, 0))
        yield ("row", 1), heads.predict(heads.row, torch.cat([above_row, z[:, :, :-1]], dim=-1))


def head_names(heads: SpatialDraftHeads) -> list[HeadName]:
    """Return kind and offset of every head, in the order of `predictions`."""
    names: list[HeadName] = [("horizontal", offset) for offset in range(1, len(heads.horizontal) + 1)]
    names += [("vertical", offset) for offset in range(1, len(heads.vertical) + 1)]
    return names + ([("row", 1)] if heads.row is not None else [])


@dataclass(frozen=True)
class HeadLoss:
    """Losses and figures of one head; all scalars.

    Args:
        match: Smooth-L1 of scaled states, or the cross-entropy of tokens.
        kl: mean KL divergence between the backbone's distribution p and the draft distribution q, in nats; `None` if
            it was not computed.
        acceptance: mean over cells of `sum(min(p, q))`: the probability that a draft token sampled from q is accepted,
            without guidance and filters; `None` if it was not computed.
    """

    match: torch.Tensor
    kl: torch.Tensor | None = None
    acceptance: torch.Tensor | None = None


def head_losses(
    heads: SpatialDraftHeads, backbone: Backbone, states: States, config: HeadTrainingConfig, measure: bool = False
) -> dict[HeadName, HeadLoss]:
    """Compute the losses of every head, averaged over its target cells.

    Args:
        heads: the draft heads.
        backbone: their backbone.
        states: states of a batch of pictures.
        config: settings of the run.
        measure: also compute the figures that are not needed for training.
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
    """Return the loss to be minimised, a scalar: the mean over heads of their weighted losses."""
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
    """Measure every head on validation pictures; no states are stale, and as many prompts are dropped as in training.

    Args:
        heads: the draft heads.
        reader: source of the states.
        indices: indices of all validation pictures; with an accelerator, each process reads its share of them.
        config: settings of the run.
        accelerator: the processes that take part.

    Returns:
        for each head, like "vertical+1": "loss", "kl" and "expected_acceptance", see [`HeadLoss`].
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
