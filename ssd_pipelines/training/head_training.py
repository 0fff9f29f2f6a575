"""Train draft heads on the hidden states of a frozen backbone.

Source: arXiv 2606.20543, appendix A.1 and table 8: Smooth-L1 between predicted and true pre-norm states, AdamW from
1e-4 to 1e-5 with 20 steps of warm-up, 3 epochs, 10 % of the prompts dropped so that the heads work for both branches
of classifier-free guidance. Under `accelerate launch` each process computes its share of every batch; the sum of their
gradients equals the gradient of a single process, up to rounding.
"""

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from tqdm.auto import tqdm

from ssd_pipelines.backbones import Backbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.loading.fingerprint import weights_fingerprint
from ssd_pipelines.pipeline import SpatialSpeculativePipeline, hidden_progress_bar
from ssd_pipelines.training.checkpoints import load_checkpoint, save_checkpoint
from ssd_pipelines.training.config import HeadTrainingConfig
from ssd_pipelines.training.distillation import TokenGrids, lossless_verifier
from ssd_pipelines.training.losses import StateReader, head_losses, total_loss, validate_heads


Report = Callable[[dict[str, Any]], None]


def train_heads(
    pipe: SpatialSpeculativePipeline,
    data: TokenGrids,
    config: HeadTrainingConfig,
    output_dir: str | os.PathLike[str],
    report: Report = lambda row: print(json.dumps(row), flush=True),
    accelerator: Accelerator | None = None,
    reader: StateReader | None = None,
    allow_foreign_data: bool = False,
) -> SpatialDraftHeads:
    """Train draft heads for `pipe`'s backbone, which is not changed, and save them to `output_dir`.

    Checkpoints are saved there too. An interrupted run continues from the last one and gives the same result as an
    uninterrupted run.

    Args:
        pipe: pipeline with the backbone.
        data: pictures that the backbone drew, see `draw_token_grids`.
        config: settings of the run.
        output_dir: folder for heads and checkpoints.
        report: is called in the main process with a dict of figures: "loss" and "lr" at a "step", or "validation".
        accelerator: defines the processes, the precision in which the heads compute (their weights are always
            float32), and the trackers; by default as configured by `accelerate launch`.
        reader: source of the states; by default they are recomputed every time they are needed.
        allow_foreign_data: accept pictures that another model drew, according to their manifest.

    Returns:
        the heads, in float32, with settings and figures in `heads.config.training`.

    Raises:
        ValueError: if there is no data, the data doesn't fit the backbone or another model drew it, or the folder
            holds another run.
        FloatingPointError: if the loss is not finite.

    Example:
        >>> data = draw_token_grids(pipe, read_prompts("prompts.txt"), "pictures")
        >>> heads = train_heads(pipe, data, HeadTrainingConfig(kl_weight=1.0), "heads")
    """
    accelerator = accelerator or Accelerator()
    backbone = pipe.adapter()
    grid = backbone.grid()
    check_data(data, backbone, grid, allow_foreign_data)
    config.check_grid(grid)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)

    training, validation = split(data, config)
    steps_an_epoch = math.ceil(len(training) / config.batch_size)
    total_steps = config.epochs * steps_an_epoch
    validate_every = config.validate_every or steps_an_epoch
    reader = reader or StateReader(backbone, grid, data)
    heads = new_heads(config, backbone, reader, training).to(backbone.device)
    optimizer = new_optimizer(heads, config)
    course = {**config.course(), "data": data.digest()}
    first_step = load_checkpoint(folder, heads, optimizer, course)
    _check_same_start(accelerator, first_step, folder)

    def tell(row: dict[str, Any], step: int) -> None:
        if accelerator.is_main_process:
            report(row)
            accelerator.log(_flat(row), step=step)

    def measure(step: int) -> dict[str, dict[str, float]]:
        heads.eval()
        figures = validate_heads(heads, reader, validation, config, accelerator)
        heads.train()
        tell({"validation": figures, "step": step, "of": total_steps}, step)
        return figures

    heads.train()
    bar = tqdm(
        total=total_steps, initial=first_step, desc="Training", unit="step", disable=not accelerator.is_main_process
    )
    for step in range(first_step, total_steps):
        epoch, position = divmod(step, steps_an_epoch)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(config.seed + epoch)).tolist()
        indices = order[position * config.batch_size : (position + 1) * config.batch_size]
        loss, lr = train_step(heads, optimizer, reader, indices, step, total_steps, config, accelerator)
        bar.update()
        done = step + 1
        if done % config.log_every == 0 or done % config.checkpoint_every == 0:
            tell({"step": done, "of": total_steps, "loss": loss, "lr": lr}, done)
        if done % validate_every == 0 and done < total_steps:
            measure(done)
        if accelerator.is_main_process and (done % config.checkpoint_every == 0 or done == total_steps):
            save_checkpoint(folder, heads, optimizer, done, course)
    bar.close()

    heads.eval()
    figures = measure(total_steps)
    passes = None
    if accelerator.is_main_process:
        if config.validation_prompts:
            prompts = [data.prompts[index] for index in validation[: config.validation_prompts]]
            passes = measure_passes(pipe, heads, prompts, config.seed)
            tell({"passes": passes}, total_steps)
        heads.register_to_config(
            training={
                **config.to_dict(),
                "pictures": len(data.prompts),
                # `base_model` names the backbone; the manifest may name a local folder, which is useless to others.
                "data": {name: value for name, value in data.manifest.items() if name != "backbone"},
                "steps": total_steps,
                "processes": accelerator.num_processes,
                "mixed_precision": accelerator.mixed_precision,
                "validation": figures,
                "passes": passes,
            }
        )
        heads.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return heads


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Context manager without gradients for the model's weights, even if a loss is computed through its image head."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def train_step(
    heads: SpatialDraftHeads,
    optimizer: torch.optim.Optimizer,
    reader: StateReader,
    indices: list[int],
    step: int,
    total_steps: int,
    config: HeadTrainingConfig,
    accelerator: Accelerator,
) -> tuple[float, float]:
    """Run one optimizer step on a batch of pictures; each process computes its share of the batch.

    Args:
        indices: indices of all pictures of the batch, the same in all processes.

    Returns:
        the loss of the whole batch, and the learning rate.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    lr = learning_rate(step, total_steps, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    # Drawn for the whole batch, so that it doesn't matter which process computes which picture.
    generator = torch.Generator().manual_seed(config.seed + step)
    dropped = torch.rand(len(indices), generator=generator) < config.prompt_dropout
    stale = torch.rand(len(indices), generator=generator) < config.stale_share

    own = list(range(accelerator.process_index, len(indices), accelerator.num_processes))
    size = max(1, math.ceil(len(own) / config.gradient_accumulation))
    optimizer.zero_grad()
    loss = torch.zeros((), device=reader.backbone.device)
    for start in range(0, len(own), size):
        part = own[start : start + size]
        states = reader.read([indices[k] for k in part], dropped[part], stale[part])
        with frozen(reader.backbone.model):
            with accelerator.autocast():
                losses = head_losses(heads, reader.backbone, states, config)
                share = total_loss(losses, config) * len(part) / len(indices)
            share.backward()
        loss += share.detach()
    parameters = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    if accelerator.num_processes > 1:
        # In the short last batch of an epoch, a process may have no pictures: its gradients are zeros.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        *gradients, loss = accelerator.reduce([*gradients, loss], reduction="sum")
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    if not torch.isfinite(loss):
        raise FloatingPointError(f"The loss is {loss.item()} at step {step + 1}: lower the learning rate.")
    nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    optimizer.step()
    return loss.item(), lr


@torch.no_grad()
def measure_passes(
    pipe: SpatialSpeculativePipeline, heads: SpatialDraftHeads, prompts: list[str], seed: int = 0
) -> dict[str, float]:
    """Measure how many passes a picture takes with these heads in lossless decoding.

    Args:
        pipe: pipeline with the backbone; its verifier gives the sampling settings.
        heads: the draft heads; they are cast to the backbone's dtype.
        prompts: one per picture.
        seed: picture k is drawn with a generator of seed `seed + k`.

    Returns:
        "mean" and "standard_error" over pictures, "autoregressive" passes, and the number of "prompts".
    """
    dtype = pipe.backbone.dtype
    cast = heads if heads.dtype == dtype else copy.deepcopy(heads).to(dtype)
    other = SpatialSpeculativePipeline.from_pipe(pipe, heads=cast, verifier=lossless_verifier(pipe, cast))
    generators = [torch.Generator().manual_seed(seed + k) for k in range(len(prompts))]
    with hidden_progress_bar(other):
        passes = torch.tensor(other(prompts, generator=generators, output_type="latent").stats.passes).double()
    error = passes.std().item() / math.sqrt(len(prompts)) if len(prompts) > 1 else 0.0
    return {
        "mean": passes.mean().item(),
        "standard_error": error,
        "autoregressive": pipe.adapter().grid().length,
        "prompts": len(prompts),
    }


def describe_training(
    pipe: SpatialSpeculativePipeline,
    data: TokenGrids,
    config: HeadTrainingConfig,
    accelerator: Accelerator | None = None,
    allow_foreign_data: bool = False,
) -> list[str]:
    """Describe what a run would train, its memory and its time, after running two steps to measure them.

    Nothing is saved, and the heads of these steps are discarded. Arguments and errors are those of `train_heads`.

    Returns:
        lines of text.
    """
    accelerator = accelerator or Accelerator()
    backbone = pipe.adapter()
    grid = backbone.grid()
    check_data(data, backbone, grid, allow_foreign_data)
    config.check_grid(grid)
    training, validation = split(data, config)
    steps = config.epochs * math.ceil(len(training) / config.batch_size)

    reader = StateReader(backbone, grid, data)
    heads = new_heads(config, backbone, reader, training).to(backbone.device)
    optimizer = new_optimizer(heads, config)
    on_gpu = backbone.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(backbone.device)
    seconds = math.inf
    for step in range(2):  # the first warms up
        begin = time.perf_counter()
        train_step(heads, optimizer, reader, training[: config.batch_size], step, steps, config, accelerator)
        seconds = min(seconds, time.perf_counter() - begin)  # includes device time: `loss.item()` waits for it
    trained = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trained)
    frozen = sum(parameter.numel() for parameter in pipe.backbone.parameters())
    peak = torch.cuda.max_memory_allocated(backbone.device) / 2**30 if on_gpu else None
    return [
        f"backbone: {backbone.name_or_path or backbone.architecture}, {frozen / 1e6:.1f} million parameters, frozen",
        f"trained: the heads alone, {config.num_horizontal} horizontal, {config.num_vertical} vertical"
        + (", 1 along the row" if config.row_head else "")
        + f", {len(trained)} tensors of {count / 1e6:.1f} million parameters",
        f"data: {len(training)} pictures to learn from, {len(validation)} to measure on",
        f"steps: {steps} of {config.batch_size} pictures, {config.epochs} epochs",
        f"memory in addition to the backbone and its activations: {16 * count / 2**30:.2f} GiB of weights, gradients "
        "and optimizer" + ("" if peak is None else f"; {peak:.2f} GiB in total at the peak of a step"),
        f"time: {seconds:.2f} s a step, {_duration(seconds * steps)} in total, by {accelerator.num_processes} process"
        + ("es" if accelerator.num_processes > 1 else ""),
    ]


def learning_rate(step: int, total_steps: int, config: HeadTrainingConfig) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay from `lr` to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def split(data: TokenGrids, config: HeadTrainingConfig) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the validation pictures, which are the last ones; at least one each."""
    size = len(data.prompts)
    num_validation = min(max(1, round(size * config.validation_share)), size - 1)
    return list(range(size - num_validation)), list(range(size - num_validation, size))


def new_heads(
    config: HeadTrainingConfig, backbone: Backbone, reader: StateReader, training: list[int]
) -> SpatialDraftHeads:
    """Create untrained heads from the config's seed; with `normalize_states`, measure their scales on some pictures."""
    some = training[: min(config.batch_size, 32)]
    nothing = torch.zeros(len(some), dtype=torch.bool)
    states = reader.read(some, nothing, nothing)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        heads = config.new_heads(backbone)
    if config.normalize_states:
        hidden = heads.to_own_states(states.hidden.cpu()).float()
        heads.register_to_config(
            hidden_scale=hidden.pow(2).mean().sqrt().item(),
            embedding_scale=states.embeddings.float().pow(2).mean().sqrt().item(),
        )
    return heads


def new_optimizer(heads: SpatialDraftHeads, config: HeadTrainingConfig) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters of the heads."""
    trained = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def check_data(data: TokenGrids, backbone: Backbone, grid: TokenGrid, allow_foreign: bool = False) -> None:
    """Check that heads for this backbone can be trained on a data set.

    Args:
        allow_foreign: accept pictures that another model drew.

    Raises:
        ValueError: if there are fewer than two pictures, the codes don't fit the backbone, or another model drew them.
    """
    if len(data.prompts) < 2 or len(data.prompts) != data.codes.shape[0]:
        raise ValueError(
            f"Head training needs at least two pictures with a prompt each, got {data.codes.shape[0]} pictures and "
            f"{len(data.prompts)} prompts."
        )
    if tuple(data.codes.shape[1:]) != (grid.rows, grid.columns):
        raise ValueError(
            f"The data has {data.codes.shape[1]} x {data.codes.shape[2]} codes per picture, the backbone draws "
            f"{grid.rows} x {grid.columns}: it was drawn by another model."
        )
    if int(data.codes.min()) < 0 or int(data.codes.max()) >= backbone.image_vocab_size:
        raise ValueError(
            f"The data has codes from {int(data.codes.min())} to {int(data.codes.max())}, the backbone knows 0 to "
            f"{backbone.image_vocab_size - 1}: it was drawn by another model, or not completely."
        )
    theirs = data.manifest.get("fingerprint")
    if allow_foreign or theirs is None:
        return
    ours = weights_fingerprint(backbone.model)
    if ours is not None and ours != theirs:
        raise ValueError(
            f"The data was drawn by {data.manifest.get('backbone') or 'a model'} with weights {theirs[:12]}, this is "
            f"{backbone.name_or_path or 'a model'} with weights {ours[:12]}: heads are trained on their own backbone's "
            "pictures, so draw some, or allow foreign data (`--allow-foreign-data`)."
        )


def _check_same_start(accelerator: Accelerator, first_step: int, folder: Path) -> None:
    starts = set(accelerator.gather(torch.tensor([first_step], device=accelerator.device)).tolist())
    if len(starts) > 1:
        raise ValueError(f"Not all processes see the same checkpoint in {folder}: give a folder that all nodes share.")


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten figures for trackers: `{"validation/vertical+1/loss": ...}`."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        elif name not in ("step", "of"):
            flat[f"{prefix}{name}"] = float(value)
    return flat


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"about {minutes / 60:.1f} hours" if minutes >= 90 else f"about {max(1, round(minutes))} minutes"
