"""`ssd-pipelines distill` and `train-heads`: draft heads for any backbone."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ssd_pipelines.cli.common import EMBEDDED, Device, Model, Precision, console, load_pipeline


class Neighborhood(StrEnum):
    cell = "cell"
    three = "three"


class Architecture(StrEnum):
    swiglu = "swiglu"
    mlp = "mlp"
    linear = "linear"


def distill(
    prompts: Annotated[str, typer.Option(help='Text file of one prompt a line, .jsonl, or "scenes".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures; a rerun goes on in it.")],
    model: Model = EMBEDDED,
    num: Annotated[int | None, typer.Option(min=2, help="How many prompts at most.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the first picture.")] = 0,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1 is none.")] = None,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Draw the pictures that draft heads learn from; under `accelerate launch` every process draws its share."""
    from accelerate import PartialState

    from ssd_pipelines.training import draw_token_grids, read_prompts

    process = PartialState()
    pipe = load_pipeline(model, None, device or (str(process.device) if process.num_processes > 1 else None), dtype)
    texts = read_prompts(prompts, num, seed)
    data = draw_token_grids(
        pipe, texts, output, batch_size, seed, guidance_scale, process.process_index, process.num_processes
    )
    console.print(f"{output}: {len(data.prompts)} pictures of {data.codes.shape[1]} x {data.codes.shape[2]} codes")


def train(
    data: Annotated[Path, typer.Option(help="Folder that `distill` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the heads; a rerun goes on in it.")],
    model: Model = EMBEDDED,
    num_horizontal: Annotated[int, typer.Option(min=1, help="Offsets along the row.")] = 5,
    num_vertical: Annotated[int, typer.Option(min=1, help="Rows below.")] = 1,
    neighborhood: Annotated[
        Neighborhood, typer.Option(help="Cells above that vertical heads see.")
    ] = Neighborhood.three,
    row_head: Annotated[bool, typer.Option(help="One more head, to refresh predictions along the row.")] = True,
    architecture: Annotated[Architecture, typer.Option(help="Of every head.")] = Architecture.swiglu,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures a step.")] = 128,
    lr: Annotated[float, typer.Option(help="Falls to a tenth.")] = 1e-4,
    kl_weight: Annotated[float, typer.Option(min=0.0, help="Of the divergence of the drafts' distribution.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and train nothing.")] = False,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Train draft heads for a model on pictures that it drew; the model stays as it is."""
    from rich.table import Table

    from ssd_pipelines.training import HeadTrainingConfig, TokenGrids, describe_training, train_heads

    pipe = load_pipeline(model, None, device, dtype)
    config = HeadTrainingConfig(
        num_horizontal=num_horizontal,
        num_vertical=num_vertical,
        neighborhood=neighborhood.value,
        row_head=row_head,
        architecture=architecture.value,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        min_lr=lr / 10,
        kl_weight=kl_weight,
        seed=seed,
    )
    grids = TokenGrids.load(data)
    for line in describe_training(pipe, grids, config):
        console.print(line)
    if dry_run:
        return
    heads = train_heads(pipe, grids, config, output, report=lambda row: console.print(_training_row(row)))
    table = Table("head", "loss", "expected acceptance", title=str(output))
    for name, figures in heads.config.training["validation"].items():
        table.add_row(name, f"{figures['loss']:.4f}", f"{figures['expected_acceptance']:.3f}")
    console.print(table)


def _training_row(row: dict[str, Any]) -> str:
    if "loss" in row:
        return f"step {row['step']} of {row['of']}: loss {row['loss']:.4f}, learning rate {row['lr']:.2e}"
    return "measuring on pictures that were kept from training"
