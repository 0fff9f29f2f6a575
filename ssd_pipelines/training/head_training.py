"""Training draft heads on the hidden states of a frozen backbone.

Source: arXiv 2606.20543, appendix A.1 and table 8: Smooth-L1 between predicted and true pre-norm states, AdamW from
1e-4 to 1e-5 with 20 steps of warm-up, 3 epochs, 10 % of the prompts dropped so that the heads serve both branches of
guidance. States are computed on the fly: those of 60,000 pictures would fill terabytes.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ssd_pipelines.backbones import Backbone, Prompt
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import Direction, SpatialDraftHeads, with_neighbors
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.training.distillation import TokenGrids


HeadKind = Literal["horizontal", "vertical", "row"]


@dataclass(frozen=True)
class HeadTrainingConfig:
    """Settings of a run; the defaults are the paper's.

    Args:
        num_horizontal, num_vertical: heads of each direction (the paper: 5, and 1 or 2).
        horizontal_rows: horizontal heads learn from so many rows at the top, since they draft the first alone; `None`
            for all rows, which decoding along every row needs.
        neighborhood, row_head, inputs, architecture, inner_width: as in [`SpatialDraftHeads`].
        epochs, batch_size, lr, min_lr, warmup_steps, weight_decay, betas: of AdamW; cosine decay.
        prompt_dropout: share of pictures whose states come from the unconditional branch.
        kl_weight: weight of a second loss, the divergence of the draft distribution from the backbone's; 0 in the
            paper.
        validation_share: share of the pictures that is kept from training and measured on.
        max_grad_norm: gradient clipping.
        seed: of weights, order and dropout; a resumed run takes the same course.
        checkpoint_every: steps between checkpoints.
    """

    num_horizontal: int = 5
    num_vertical: int = 1
    horizontal_rows: int | None = None
    neighborhood: str = "cell"
    row_head: bool = False
    inputs: str = "both"
    architecture: str = "swiglu"
    inner_width: int | None = None
    epochs: int = 3
    batch_size: int = 128
    lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_steps: int = 20
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    prompt_dropout: float = 0.1
    kl_weight: float = 0.0
    validation_share: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100


@dataclass(frozen=True)
class States:
    """What the backbone went through on a batch of pictures, laid out on the grid.

    Args:
        hidden: `(batch, rows, columns, hidden_size)`, the pre-norm state that predicts each cell.
        embeddings: same shape, the embedding of each cell's token.
    """

    hidden: torch.Tensor
    embeddings: torch.Tensor


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


@torch.no_grad()
def backbone_states(
    backbone: Backbone, grid: TokenGrid, codes: torch.Tensor, prompts: list[str], unconditional: torch.Tensor
) -> States:
    """States of finished pictures, in one pass over prompt and codes.

    Args:
        codes: `int64 (batch, rows, columns)`.
        unconditional: `bool (batch,)`: which pictures are read behind the unconditional prompt.
    """
    both = backbone.encode_prompt(prompts, None, guided=True)
    rows = torch.arange(len(prompts), device=codes.device) + len(prompts) * unconditional
    prompt = Prompt(both.embeddings[rows], both.attention_mask[rows], guided=False)
    return States(*backbone.read(codes, prompt, grid))


def train_heads(
    pipe: SpatialSpeculativePipeline,
    data: TokenGrids,
    config: HeadTrainingConfig,
    output_dir: str | os.PathLike[str],
    report: Callable[[dict[str, Any]], None] = lambda row: print(json.dumps(row), flush=True),
) -> SpatialDraftHeads:
    """Train heads for `pipe`'s backbone, which stays as it is, and save them to `output_dir`.

    Checkpoints go there too, and a run that was killed goes on from the last with the same course as an unbroken one.

    Args:
        data: pictures that the backbone drew, see `draw_token_grids`.
        report: is called with a dict of figures every `checkpoint_every` steps.

    Returns:
        the heads, in float32, with settings and validation figures in `heads.config.training`.

    Raises:
        ValueError: for no data, or data that doesn't fit the backbone.
        FloatingPointError: if the loss is no longer finite.
    """
    backbone = pipe.adapter()
    grid = backbone.grid()
    _check_data(data, backbone, grid)
    device = pipe.backbone.device
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)

    num_validation = max(1, round(len(data.prompts) * config.validation_share))
    training = range(len(data.prompts) - num_validation)
    steps_an_epoch = math.ceil(len(training) / config.batch_size)
    total_steps = config.epochs * steps_an_epoch

    def states(indices: list[int], seed: int) -> States:
        dropped = torch.rand(len(indices), generator=torch.Generator().manual_seed(seed)) < config.prompt_dropout
        prompts = [data.prompts[index] for index in indices]
        return backbone_states(backbone, grid, data.codes[indices].to(device), prompts, dropped.to(device))

    heads = _new_heads(config, backbone, states(list(training[: config.batch_size]), config.seed)).to(device)
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    first_step = _load_checkpoint(folder, heads, optimizer)
    heads.train()
    for step in range(first_step, total_steps):
        epoch, position = divmod(step, steps_an_epoch)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(config.seed + epoch)).tolist()
        indices = order[position * config.batch_size : (position + 1) * config.batch_size]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total_steps, config)
        loss = torch.stack(list(_losses(heads, backbone, states(indices, step), config).values())).mean()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"The loss is {loss.item()} at step {step}: lower the learning rate.")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(heads.parameters(), config.max_grad_norm)
        optimizer.step()
        if (step + 1) % config.checkpoint_every == 0:
            report({"step": step + 1, "of": total_steps, "loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]})
            _save_checkpoint(folder, heads, optimizer, step + 1)

    heads.eval()
    validation = list(range(len(training), len(data.prompts)))
    figures = validate_heads(heads, backbone, states(validation[: config.batch_size], config.seed), config)
    report({"validation": figures})
    heads.register_to_config(training={**asdict(config), "pictures": len(data.prompts), "validation": figures})
    heads.save_pretrained(folder)
    return heads


def describe_training(pipe: SpatialSpeculativePipeline, data: TokenGrids, config: HeadTrainingConfig) -> list[str]:
    """What a run would train, in a few lines: heads and their sizes, steps, and memory beside the backbone."""
    backbone = pipe.adapter()
    _check_data(data, backbone, backbone.grid())
    with torch.device("meta"):
        heads = SpatialDraftHeads.for_backbone(backbone, **_head_settings(config))
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    training = len(data.prompts) - max(1, round(len(data.prompts) * config.validation_share))
    steps = config.epochs * math.ceil(training / config.batch_size)
    return [
        f"backbone: {backbone.name_or_path or backbone.architecture}, frozen",
        f"heads: {config.num_horizontal} horizontal, {config.num_vertical} vertical"
        + (", 1 along the row" if config.row_head else "")
        + f", {parameters / 1e6:.1f} million parameters",
        f"data: {training} pictures to learn from, {len(data.prompts) - training} to measure on",
        f"steps: {steps} of {config.batch_size} pictures, {config.epochs} epochs",
        f"memory beside the backbone and its activations: {16 * parameters / 2**30:.2f} GiB of weights, gradients and "
        "optimizer",
    ]


def learning_rate(step: int, total_steps: int, config: HeadTrainingConfig) -> float:
    """Linear warm-up, then a cosine from `lr` to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def validate_heads(
    heads: SpatialDraftHeads, backbone: Backbone, states: States, config: HeadTrainingConfig
) -> dict[str, dict[str, float]]:
    """By head, for instance "vertical+1": Smooth-L1 loss, and expected acceptance.

    Expected acceptance is the mean over cells of `sum(min(p, q))`, the chance that a draft drawn from q is kept,
    without guidance and filters.
    """
    losses = _losses(heads, backbone, states, config)
    figures = {}
    for direction, offset, predicted, target in _predictions(heads, states, config.horizontal_rows):
        p, q = (backbone.logits(hidden).softmax(-1) for hidden in (target, predicted))
        figures[f"{direction}+{offset}"] = {
            "loss": losses[direction, offset].item(),
            "expected_acceptance": torch.minimum(p, q).sum(-1).mean().item(),
        }
    return figures


def _predictions(
    heads: SpatialDraftHeads, states: States, horizontal_rows: int | None = None
) -> Iterator[tuple[HeadKind, int, torch.Tensor, torch.Tensor]]:
    """Of every head: what it predicts and what the backbone's states are, each `(batch, n, hidden_size)`."""
    z, scale = heads.source_features(states.hidden, states.embeddings), heads.config.hidden_scale
    around = with_neighbors(z)
    above = around if heads.config.neighborhood == "three" else z
    directions: tuple[tuple[Direction, torch.Tensor, nn.ModuleList], ...] = (
        ("horizontal", z, heads.horizontal),
        ("vertical", above, heads.vertical),
    )
    for direction, features, modules in directions:
        rows = horizontal_rows if direction == "horizontal" else None
        for offset, head in enumerate(modules, start=1):
            source, _ = offset_pairs(features[:, :rows], direction, offset)
            _, target = offset_pairs(states.hidden[:, :rows], direction, offset)
            yield direction, offset, head(source).flatten(1, 2) * scale, target.flatten(1, 2)
    if heads.row is not None:
        # Every cell that has a left neighbour; above the first row there are zeros.
        above_row = nn.functional.pad(around[:, :-1, 1:], (0, 0, 0, 0, 1, 0)).unflatten(-1, (3, -1))
        predicted = heads.predict_cells(above_row, z[:, :, :-1])
        yield "row", 1, predicted.flatten(1, 2), states.hidden[:, :, 1:].flatten(1, 2)


def _losses(
    heads: SpatialDraftHeads, backbone: Backbone, states: States, config: HeadTrainingConfig
) -> dict[tuple[HeadKind, int], torch.Tensor]:
    losses = {}
    for direction, offset, predicted, target in _predictions(heads, states, config.horizontal_rows):
        scale = heads.config.hidden_scale
        loss = nn.functional.smooth_l1_loss(predicted / scale, target.float() / scale)
        if config.kl_weight:
            with torch.no_grad():
                p = backbone.logits(target).log_softmax(-1)
            q = backbone.logits(predicted.to(target.dtype)).log_softmax(-1)
            divergence = nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
            loss = loss + config.kl_weight * divergence
        losses[direction, offset] = loss
    return losses


def _head_settings(config: HeadTrainingConfig) -> dict[str, Any]:
    names = ("num_horizontal", "num_vertical", "neighborhood", "row_head", "inputs", "architecture", "inner_width")
    return {name: getattr(config, name) for name in names}


def _new_heads(config: HeadTrainingConfig, backbone: Backbone, states: States) -> SpatialDraftHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return SpatialDraftHeads.for_backbone(
            backbone,
            **_head_settings(config),
            hidden_scale=states.hidden.float().pow(2).mean().sqrt().item(),
            embedding_scale=states.embeddings.float().pow(2).mean().sqrt().item(),
        )


def _check_data(data: TokenGrids, backbone: Backbone, grid: TokenGrid) -> None:
    if len(data.prompts) < 2 or len(data.prompts) != data.codes.shape[0]:
        raise ValueError(
            f"Head training needs at least two pictures with a prompt each, got {data.codes.shape[0]} pictures and "
            f"{len(data.prompts)} prompts."
        )
    if tuple(data.codes.shape[1:]) != (grid.rows, grid.columns):
        raise ValueError(
            f"The data has {data.codes.shape[1]} x {data.codes.shape[2]} codes a picture, the backbone draws "
            f"{grid.rows} x {grid.columns}: it was drawn by another model."
        )
    if int(data.codes.min()) < 0 or int(data.codes.max()) >= backbone.image_vocab_size:
        raise ValueError(
            f"The data has codes from {int(data.codes.min())} to {int(data.codes.max())}, the backbone knows 0 to "
            f"{backbone.image_vocab_size - 1}: it was drawn by another model, or interrupted."
        )


# --- checkpoints: safetensors only, so that resuming opens no pickle ------------------------------------------------


def _save_checkpoint(folder: Path, heads: SpatialDraftHeads, optimizer: torch.optim.AdamW, step: int) -> None:
    tensors = {f"heads.{name}": tensor for name, tensor in heads.state_dict().items()}
    for name, parameter in heads.named_parameters():
        tensors |= {f"{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    partial = folder / "checkpoint.partial"
    save_file(tensors, partial, metadata={"step": str(step)})
    partial.replace(folder / "checkpoint.safetensors")


def _load_checkpoint(folder: Path, heads: SpatialDraftHeads, optimizer: torch.optim.AdamW) -> int:
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return 0
    tensors = load_file(path)
    heads.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("heads.")})
    for name, parameter in heads.named_parameters():
        state = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
        optimizer.state[parameter] = {
            key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
        }
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])
