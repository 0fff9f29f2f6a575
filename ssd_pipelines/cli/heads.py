"""`ssd-pipelines distill` and `train-heads`: train draft heads for any backbone."""

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ssd_pipelines.cli.common import EMBEDDED, Device, Heads, Model, Precision, console, load_pipeline


PATIENCE = timedelta(days=7)
"""How long a process waits for the others: in a large job, they may finish hours apart."""


Drawing = Literal["auto", "autoregressive", "speculative"]
Mixed = Literal["no", "bf16"]
Tracker = Literal["tensorboard", "trackio"]

DRAWING_PRESETS: dict[str, dict[str, Any]] = {"tiny": {"prompts": "scenes", "num": 96, "batch_size": 32}}
TRAINING_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "horizontal_rows": 3,
        "epochs": 8,
        "batch_size": 16,
        "lr": 2e-3,
        "warmup_steps": 5,
        "validation_share": 0.1,
        "checkpoint_every": 10,
    },
    "paper": {"neighborhood": "cell", "row_head": False, "kl_weight": 0.0},
}


def distill(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures; a rerun continues it.")],
    prompts: Annotated[
        str | None,
        typer.Option(help='Text file with one prompt per line, .jsonl, "user/name:column" on the Hub, or "scenes".'),
    ] = None,
    model: Model = EMBEDDED,
    heads: Heads = None,
    preset: Annotated[Literal["tiny"] | None, typer.Option(help="tiny: 96 of our own prompts.")] = None,
    num: Annotated[int | None, typer.Option(min=2, help="Maximum number of prompts.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Prompts to exclude: a file like `--prompts`, or a folder of them.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture.")] = 0,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1: no guidance.")] = None,
    decoder: Annotated[
        Drawing, typer.Option(help="speculative: same pictures, drafted by heads; auto: that, on a GPU with heads.")
    ] = "auto",
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Draw the training pictures for draft heads; under `accelerate launch` every process draws its share."""
    from accelerate import PartialState

    from ssd_pipelines.training import TokenGrids, draw_token_grids, read_prompts

    chosen = _with_preset(context, DRAWING_PRESETS[preset] if preset else {})
    if chosen["prompts"] is None:
        raise ValueError('Say what to draw: `--prompts` with a file, a data set on the Hub or "scenes".')
    texts = read_prompts(chosen["prompts"], chosen["num"], seed, exclude or [])
    process = PartialState(cpu=_on_cpu(device), timeout=PATIENCE)
    pipe = load_pipeline(model, heads, device or str(process.device), dtype)
    draw_token_grids(
        pipe,
        texts,
        output,
        chosen["batch_size"],
        seed,
        guidance_scale,
        process.process_index,
        process.num_processes,
        decoder,
    )
    process.wait_for_everyone()
    if process.is_main_process:
        data = TokenGrids.load(output)
        size = f"{data.codes.shape[1]} x {data.codes.shape[2]}"
        console.print(f"{output}: {len(data.prompts)} pictures of {size} codes, by {data.manifest['decoder']}")
    process.destroy_process_group()


def train(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="Folder that `distill` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the heads; a rerun continues it.")],
    model: Model = EMBEDDED,
    preset: Annotated[
        Literal["tiny", "paper"] | None,
        typer.Option(help="tiny: takes minutes on a CPU, for the embedded model; paper: the paper's heads and loss."),
    ] = None,
    num_horizontal: Annotated[int, typer.Option(min=1, help="Number of horizontal heads.")] = 5,
    num_vertical: Annotated[int, typer.Option(min=1, help="Number of vertical heads.")] = 1,
    horizontal_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows from the top that horizontal heads train on. Default: all.")
    ] = None,
    neighborhood: Annotated[
        Literal["cell", "three"], typer.Option(help="Cells above the target that vertical heads read.")
    ] = "three",
    row_head: Annotated[bool, typer.Option(help="One more head, to refresh predictions along the row.")] = True,
    inputs: Annotated[
        Literal["both", "hidden", "embedding"], typer.Option(help="What heads read at a position.")
    ] = "both",
    states: Annotated[
        Literal["pre_norm", "post_norm"], typer.Option(help="Backbone states before or after its final norm.")
    ] = "pre_norm",
    target: Annotated[Literal["hidden", "token"], typer.Option(help="Match states, or only tokens.")] = "hidden",
    architecture: Annotated[Literal["swiglu", "mlp", "linear"], typer.Option(help="Type of every head.")] = "swiglu",
    shared_weights: Annotated[bool, typer.Option(help="One gated layer for all heads.")] = False,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures per step, over all processes.")] = 128,
    gradient_accumulation: Annotated[int, typer.Option(min=1, help="Parts of a batch, to save memory.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW after the warm-up.")] = 1e-4,
    min_lr: Annotated[float | None, typer.Option(help="Final learning rate. Default: a tenth of `--lr`.")] = None,
    warmup_steps: Annotated[int, typer.Option(min=0)] = 20,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.01,
    prompt_dropout: Annotated[float, typer.Option(help="Share of pictures read without their prompt.")] = 0.1,
    alpha: Annotated[float, typer.Option(min=0.0, help="Weight of the horizontal heads' losses.")] = 1.0,
    beta: Annotated[float, typer.Option(min=0.0, help="Weight of the vertical heads' losses.")] = 1.0,
    kl_weight: Annotated[float, typer.Option(min=0.0, help="Weight of the KL loss on draft distributions.")] = 1.0,
    stale_share: Annotated[float, typer.Option(help="Share of pictures whose source states are stale.")] = 0.0,
    validation_share: Annotated[float, typer.Option(help="Share of pictures used for validation.")] = 0.05,
    validation_prompts: Annotated[int, typer.Option(min=0, help="Pictures drawn at the end to count passes.")] = 8,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    mixed_precision: Annotated[
        Mixed | None, typer.Option(help="Precision of the heads; weights stay float32. Default: bf16 on a GPU.")
    ] = None,
    report_to: Annotated[Tracker | None, typer.Option(help="Tracker for curves, through accelerate.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Accept data that is not complete yet.")] = False,
    allow_foreign_data: Annotated[
        bool, typer.Option("--allow-foreign-data", help="Accept data that a model with other weights drew.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Describe the run without training.")] = False,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Train draft heads for a model on pictures that it drew; the model itself is not changed.

    Under `accelerate launch` every process computes its share of each batch.
    """
    from dataclasses import fields

    from ssd_pipelines.training import HeadTrainingConfig, TokenGrids, describe_training, train_heads

    chosen = _with_preset(context, TRAINING_PRESETS[preset] if preset else {})
    if chosen["min_lr"] is None:
        chosen["min_lr"] = chosen["lr"] / 10
    names = {field.name for field in fields(HeadTrainingConfig)}
    config = HeadTrainingConfig(**{name: value for name, value in chosen.items() if name in names})
    grids = TokenGrids.load(data, partial)
    accelerator = _accelerator(mixed_precision, report_to, device, output)
    pipe = load_pipeline(model, None, device or str(accelerator.device), dtype)
    # All processes run the steps of a dry run; only the main process prints.
    if dry_run:
        for line in describe_training(pipe, grids, config, accelerator, allow_foreign_data):
            if accelerator.is_main_process:
                console.print(line)
    else:
        if report_to is not None:
            settings = {name: value for name, value in config.to_dict().items() if isinstance(value, int | float | str)}
            accelerator.init_trackers("ssd-heads", config=settings)
        train_heads(pipe, grids, config, output, _show, accelerator, allow_foreign_data=allow_foreign_data)
        if accelerator.is_main_process:
            console.print(f"{output}: draft heads; load them with `--heads {output}` or `pipe.load_ssd_heads(...)`")
    accelerator.end_training()


def _with_preset(context: typer.Context, preset: dict[str, Any]) -> dict[str, Any]:
    """Return the command's values by name; the preset replaces those that the user did not give."""
    chosen = dict(context.params)
    for name, value in preset.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "DEFAULT":  # compared by name: typer has its own copy of click
            chosen[name] = value
    return chosen


def _on_cpu(device: str | None) -> bool:
    """Whether this process computes on the CPU; accelerate must know, or processes on one CPU can't connect."""
    import torch
    from accelerate.utils import parse_flag_from_env

    if device is not None:
        return device.startswith("cpu")
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def _accelerator(mixed: Mixed | None, report_to: Tracker | None, device: str | None, folder: Path) -> Any:
    import os

    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    if report_to is not None and find_spec(report_to) is None:
        raise ValueError(f"`--report-to {report_to}` needs the {report_to} library: pip install {report_to}.")
    precision = mixed or os.environ.get("ACCELERATE_MIXED_PRECISION")
    on_gpu = torch.cuda.is_available() and not _on_cpu(device)
    if precision == "fp16":
        raise ValueError("Heads train in bf16 or without mixed precision, got fp16: set `--mixed-precision bf16`.")
    return Accelerator(
        mixed_precision=precision or ("bf16" if on_gpu else "no"),
        cpu=_on_cpu(device),
        log_with=report_to,
        project_dir=str(folder),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )


def _show(row: dict[str, Any]) -> None:
    from rich.table import Table

    if "loss" in row:
        console.print(f"step {row['step']} of {row['of']}: loss {row['loss']:.4f}, learning rate {row['lr']:.2e}")
    elif "validation" in row:
        title = f"after {row['step']} of {row['of']} steps, on validation pictures"
        table = Table("head", "loss", "KL", "expected acceptance", title=title)
        for name, figures in row["validation"].items():
            table.add_row(name, *(f"{figures[key]:.4f}" for key in ("loss", "kl", "expected_acceptance")))
        console.print(table)
    else:
        passes = row["passes"]
        console.print(
            f"lossless decoding takes {passes['mean']:.1f} ± {passes['standard_error']:.1f} passes per picture "
            f"({passes['prompts']} prompts), autoregressive decoding {passes['autoregressive']}"
        )
