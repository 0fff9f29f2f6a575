"""`ssd-pipelines benchmark`: measure the cost of decoders and passes, and the quality of pictures."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ssd_pipelines.cli.common import (
    EMBEDDED,
    Device,
    Heads,
    Model,
    Precision,
    console,
    escape,
    load_pipeline,
    machine,
)


if TYPE_CHECKING:
    from ssd_pipelines.verifiers import Verifier


app = typer.Typer(help="Measure decoders on the embedded model or your own.", no_args_is_help=True)


@app.command("scenes")
def scenes(
    model: Model = EMBEDDED,
    heads: Heads = None,
    num_prompts: Annotated[int, typer.Option(min=6, help="Number of prompts, spread evenly over six families.")] = 300,
    rounds: Annotated[str, typer.Option(help="Numbers of verification rounds to try, separated by commas.")] = "0,1,2",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 50,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1: no guidance.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Measure the six-task score of autoregressive, lossless and speculative decoding by number of rounds."""
    import json

    from rich.table import Table

    from ssd_pipelines.evaluation.scenes import score_scenes
    from ssd_pipelines.scenes import FAMILIES, evaluation_tasks
    from ssd_pipelines.verifiers import AutoregressiveVerifier, SpatialDraftVerifier

    if not re.fullmatch(r"\d+(,\d+)*", rounds):
        raise ValueError(f"`--rounds` takes whole numbers with commas between them, like 0,1,2, got {rounds!r}.")
    pipe = load_pipeline(model, heads, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    tasks = evaluation_tasks(num_prompts, seed=seed)
    config = pipe.verifier.config
    decoders: dict[str, Verifier] = {"autoregressive": AutoregressiveVerifier.from_config(config)}
    if pipe.heads is not None:
        decoders["SSD, lossless"] = SpatialDraftVerifier.from_config(config, rounds=None, lossless=True)
        for number in rounds.split(","):
            decoders[f"SSD, {number} rounds"] = SpatialDraftVerifier.from_config(config, rounds=int(number))

    table = Table("decoder", "passes", "six-task", "±", *FAMILIES, title=f"{num_prompts} prompts")
    rows = {}
    for name, verifier in decoders.items():
        score = score_scenes(pipe, verifier, tasks, seed, batch_size, label=name, guidance_scale=guidance_scale)
        families = [f"{score.by_family[family]:.2f}" for family in FAMILIES]
        table.add_row(name, f"{score.nfe:.1f}", f"{score.six_task:.3f}", f"{score.standard_error:.3f}", *families)
        rows[name] = score.to_dict()
        if json_path is not None:
            figures = {"num_prompts": num_prompts, "seed": seed, "rows": rows}
            json_path.write_text(json.dumps(figures, indent=2), "utf-8")
    Console(width=140).print(table)


@app.command("latency")
def latency(
    model: Model = EMBEDDED,
    heads: Heads = None,
    prompt: Annotated[str, typer.Option(help="Prompt to draw.")] = "a photo of a red circle and a blue square",
    rounds: Annotated[int | None, typer.Option(min=0, help="Verification rounds. Default: the verifier's.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs; medians are shown.")] = 7,
    library: Annotated[bool, typer.Option(help="Also compare our autoregressive loop with transformers' own.")] = True,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Measure time at batch size 1 relative to autoregressive decoding, to the bare passes, and to transformers."""
    from ssd_pipelines.evaluation.latency import library_ratio, measure_latency
    from ssd_pipelines.verifiers import AutoregressiveVerifier

    pipe = load_pipeline(model, heads, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    changes = {} if rounds is None else {"rounds": rounds}
    if pipe.heads is None:
        raise ValueError(f"{model} has no draft heads to speculate with: give `--heads`.")
    for name, verifier in (
        ("speculative", type(pipe.verifier).from_config(pipe.verifier.config, **changes)),
        ("autoregressive", AutoregressiveVerifier.from_config(pipe.verifier.config)),
    ):
        report = measure_latency(pipe, verifier, prompt, repeats)
        console.print(f"[bold]{name}[/]: {report.nfe} passes, on {machine(pipe)}")
        if name == "speculative":
            console.print(f"  passes, AR / ours           {report.nfe_ratio:.2f}")
            console.print(f"  wall time, AR / ours        {report.wall_ratio:.2f}")
            console.print(f"  share of time in drafting   {report.drafting_share:.1%}")
        console.print(f"  wall time / bare passes     {report.overhead:.3f}")
        console.print(f"  the same without drafting   {report.overhead_without_drafting:.3f}")
    if library:
        console.print(f"transformers' generate / our autoregressive loop  {library_ratio(pipe, prompt, repeats):.2f}")


@app.command("decoders")
def decoders(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for figures and plot; a rerun continues it.")],
    model: Model = EMBEDDED,
    heads: Heads = None,
    paper_heads: Annotated[
        str | None, typer.Option(help="Heads for the paper's rows. Default: the model's own.")
    ] = None,
    preset: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: a few decoders and pictures; full: all of them.")
    ] = "full",
    only: Annotated[list[str] | None, typer.Option(help="Only rows whose name contains this; repeatable.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=6, help="Default: 300, or 36 with the quick preset.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 50,
    repeats: Annotated[int, typer.Option(min=0, help="Interleaved timings at batch size 1; 0 for none.")] = 3,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Compare all decoders, ours and those of other papers, on the same prompts and seeds."""
    import json

    from rich.table import Table

    from ssd_pipelines.evaluation.decoders import QUICK, all_decoders, compare_decoders, pareto_front, plot, write_csv
    from ssd_pipelines.heads import SpatialDraftHeads
    from ssd_pipelines.scenes import CHECKPOINT, evaluation_tasks

    pipe = load_pipeline(model, heads, device, dtype)
    if pipe.heads is None:
        raise ValueError(f"{model} has no draft heads to speculate with: give `--heads`.")
    if paper_heads is None and model == EMBEDDED and (CHECKPOINT / "paper_heads").is_dir():
        paper_heads = str(CHECKPOINT / "paper_heads")
    drafting = None
    if paper_heads is not None:
        drafting = SpatialDraftHeads.from_pretrained(paper_heads, dtype=pipe.backbone.dtype).to(pipe.backbone.device)
    decoders = all_decoders()
    if preset == "quick":
        decoders = [decoder for decoder in decoders if decoder.name in QUICK]
    if only:
        decoders = decoders[:1] + [d for d in decoders[1:] if any(part.lower() in d.name.lower() for part in only)]
    number = num_prompts or (36 if preset == "quick" else 300)
    tasks = evaluation_tasks(number, seed=seed)
    figures = compare_decoders(
        pipe,
        decoders,
        tasks,
        output,
        drafting,
        seed,
        min(batch_size, number),
        min(repeats, 1 if preset == "quick" else repeats),
    )
    front = pareto_front(figures)
    table = Table(
        "decoder",
        "lossless",
        "passes",
        "tokens/pass",
        "wall AR/ours",
        "drafting",
        "six-task",
        "±",
        "agreement",
        "nats/code",
        "PSNR",
        title=f"{number} prompts, on {machine(pipe)}; * on the Pareto front",
    )
    for decoder in decoders:
        row = figures[decoder.name]
        table.add_row(
            decoder.name + (" *" if decoder.name in front else ""),
            "yes" if decoder.lossless else "",
            f"{row.passes:.1f}",
            f"{row.tokens_per_pass:.1f}",
            "" if row.wall_ratio is None else f"{row.wall_ratio:.2f}",
            "" if row.drafting_share is None else f"{row.drafting_share:.0%}",
            f"{row.six_task:.3f}",
            f"{row.standard_error:.3f}",
            f"{row.agreement:.3f}",
            f"{-row.log_likelihood:.4f}",
            f"{row.psnr:.1f}",
        )
    Console(width=150).print(table)
    write_csv(figures, output / "decoders.csv")
    (output / "decoders.json").write_text(json.dumps({n: vars(row) for n, row in figures.items()}, indent=2), "utf-8")
    try:
        plot(figures, {decoder.name: decoder.group for decoder in decoders}, output / "decoders.png")
    except ImportError as error:
        console.print(f"[yellow]Note:[/] {escape(str(error))}")


@app.command("cost")
def cost(
    model: Model = EMBEDDED,
    heads: Heads = None,
    random: Annotated[
        Literal["100m", "janus-pro-1b", "janus-pro-7b"] | None,
        typer.Option(help="Use random weights of this size instead of a model, without a download."),
    ] = None,
    widths: Annotated[str, typer.Option(help="Positions per pass, separated by commas.")] = "1,4,8,16,32,48,96",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs; medians are shown.")] = 15,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Measure the cost of wide passes and of drafting on this machine, in autoregressive steps."""
    import torch
    from rich.table import Table

    from ssd_pipelines.evaluation.latency import measure_width_costs

    if not re.fullmatch(r"\d+(,\d+)*", widths):
        raise ValueError(f"`--widths` takes whole numbers with commas between them, like 1,8,32, got {widths!r}.")
    if random is None:
        pipe = load_pipeline(model, heads, device, dtype)
    else:
        from ssd_pipelines.testing import random_pipeline

        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        precision = dtype or ("float32" if place == "cpu" else "bfloat16")
        pipe = random_pipeline(random, getattr(torch, precision), place)
    table = Table("tokens", "pass", "drafting", title=f"cost in autoregressive steps, on {machine(pipe)}")
    for row in measure_width_costs(pipe, [int(width) for width in widths.split(",")], repeats):
        drafting = "" if row.drafting_cost is None else f"{row.drafting_cost:.2f}"
        table.add_row(str(row.tokens), f"{row.pass_cost:.2f}", drafting)
    console.print(table)
