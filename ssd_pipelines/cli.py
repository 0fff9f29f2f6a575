"""The `ssd-pipelines` command."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console


if TYPE_CHECKING:
    from ssd_pipelines.pipeline import SpatialSpeculativePipeline
    from ssd_pipelines.pipeline_output import SpatialSpeculativePipelineOutput
    from ssd_pipelines.verifiers import Verifier


EMBEDDED = "embedded"

app = typer.Typer(
    help="Draw pictures with autoregressive image models by spatially speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
benchmark = typer.Typer(help="Measure decoders on the embedded model or your own.", no_args_is_help=True)
app.add_typer(benchmark, name="benchmark")
convert = typer.Typer(help="Make loadable folders of checkpoints in other formats.", no_args_is_help=True)
app.add_typer(convert, name="convert")
console = Console(highlight=False, soft_wrap=True)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Neighborhood(StrEnum):
    cell = "cell"
    three = "three"


class Architecture(StrEnum):
    swiglu = "swiglu"
    mlp = "mlp"
    linear = "linear"


class RandomSize(StrEnum):
    small = "100m"
    janus_1b = "janus-pro-1b"
    janus_7b = "janus-pro-7b"


class Preset(StrEnum):
    quick = "quick"
    full = "full"


class Decoder(StrEnum):
    ssd = "ssd"
    ar = "ar"


Model = Annotated[str, typer.Option("--model", "-m", help="Hub repository or folder, or the embedded model.")]
Heads = Annotated[str | None, typer.Option(help="Draft heads: Hub repository or folder. Default: the model's own.")]
Device = Annotated[str | None, typer.Option(help='Like "cpu", "cuda", "cuda:1" or "mps". Default: a GPU if present.')]
Precision = Annotated[Dtype | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")]


def main() -> None:
    """Run the command; what the user can mend is said in one sentence, without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]Error:[/] {_escape(str(error))}")
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        import ssd_pipelines

        console.print(ssd_pipelines.__version__)
        raise typer.Exit


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to draw; several prompts draw a batch.")] = None,
    model: Model = EMBEDDED,
    heads: Heads = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path("outputs"),
    num_images: Annotated[int, typer.Option("--num-images", "-n", min=1, help="Pictures a prompt.")] = 1,
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="Of the first picture; the next has seed + 1.")] = 0,
    decoder: Annotated[Decoder, typer.Option(help="Speculative (ssd) or autoregressive (ar) decoding.")] = Decoder.ssd,
    rounds: Annotated[int | None, typer.Option(min=0, help="Correction rounds of a block of rows.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Rows that are drafted together.")] = None,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1 is none.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0 is argmax.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest codes; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest codes up to this mass.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Draw it autoregressively too, side by side.")] = False,
    like: Annotated[Path | None, typer.Option(help="Draw the picture of this PNG again, by its own settings.")] = None,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Draw pictures from text and save them as PNGs that remember how they were drawn."""
    import torch

    from ssd_pipelines import __version__
    from ssd_pipelines.pictures import read_settings, save_png, side_by_side
    from ssd_pipelines.verifiers import AutoregressiveVerifier

    if like is not None:
        if prompts:
            raise ValueError("Give a prompt or `--like`, not both: the PNG carries its own prompt.")
        settings = read_settings(like)
        prompts, model, heads = [settings["prompt"]], settings["model"], settings["heads"]
        decoder, num_images, seed = Decoder(settings["decoder"]), 1, settings["seed"]
        guidance_scale, dtype = settings["guidance_scale"], Dtype(settings["dtype"])
        verifier_settings = settings["verifier"]
    else:
        verifier_settings = {
            name: value
            for name, value in (
                ("rounds", rounds),
                ("block_size", block_size),
                ("temperature", temperature),
                ("top_k", top_k),
                ("top_p", top_p),
            )
            if value is not None
        }
    if not prompts:
        raise ValueError('Say what to draw, for instance: ssd-pipelines generate "a red circle and a blue square".')

    pipe = _load(model, heads, device, dtype)
    if decoder is Decoder.ssd and pipe.heads is None:
        if rounds is not None or block_size is not None or compare:
            raise ValueError(f"{model} has no draft heads to speculate with: give `--heads`, or `--decoder ar`.")
        decoder = Decoder.ar
    if decoder is Decoder.ar and (rounds is not None or block_size is not None):
        raise ValueError("`--rounds` and `--block-size` belong to speculative decoding: leave out `--decoder ar`.")
    if decoder is Decoder.ar and compare:
        raise ValueError("`--compare` puts speculative beside autoregressive decoding: leave out `--decoder ar`.")
    verifier_class = AutoregressiveVerifier if decoder is Decoder.ar else type(pipe.verifier)
    verifier = verifier_class.from_config(pipe.verifier.config, **verifier_settings)
    if model == EMBEDDED:
        _warn_of_unknown_words(prompts)

    texts = [text for text in prompts for _ in range(num_images)]
    seeds = [seed + index for index in range(len(texts))]

    def draw(which: "Verifier") -> "SpatialSpeculativePipelineOutput":
        pipe.verifier = which
        generators = [torch.Generator().manual_seed(number) for number in seeds]
        return pipe(texts, generator=generators, guidance_scale=guidance_scale)

    if compare:
        _warm_up(pipe, texts[0], guidance_scale)
    drawn = draw(verifier)
    described = {
        "version": __version__,
        "model": model,
        "heads": heads,
        "decoder": decoder.value,
        "guidance_scale": pipe.guidance_scale,
        "dtype": str(pipe.backbone.dtype).removeprefix("torch."),
        "verifier": {name: verifier.config[name] for name in _settings_of(verifier)},
        "nfe": drawn.stats.nfe,
    }
    names = [f"{_slug(text)}-{number}" for text, number in zip(texts, seeds, strict=True)]
    for image, text, number, name in zip(drawn.images, texts, seeds, names, strict=True):
        path = output / f"{name}.png"
        save_png(image, path, {**described, "prompt": text, "seed": number})
        console.print(f"{path}")
    console.print(_summary(decoder.value, drawn))
    if not compare:
        return

    reference = draw(AutoregressiveVerifier.from_config(verifier.config))
    console.print(_summary("ar", reference))
    for index, name in enumerate(names):
        pair = [
            (reference.images[index], ["autoregressive", *_caption(reference, len(texts))]),
            (drawn.images[index], ["spatially speculative", *_caption(drawn, len(texts))]),
        ]
        path = output / f"{name}-compare.png"
        sheet = side_by_side(pair, texts[index])
        save_png(sheet, path, {**described, "prompt": texts[index], "seed": seeds[index]})
        console.print(f"{path}")
    fewer = reference.stats.nfe / drawn.stats.nfe
    faster = reference.stats.seconds["total"] / drawn.stats.seconds["total"]
    console.print(f"{fewer:.1f} times fewer passes, {faster:.1f} times less time, on {_machine(pipe)}")


@app.command()
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
    pipe = _load(model, None, device or (str(process.device) if process.num_processes > 1 else None), dtype)
    texts = read_prompts(prompts, num, seed)
    data = draw_token_grids(
        pipe, texts, output, batch_size, seed, guidance_scale, process.process_index, process.num_processes
    )
    console.print(f"{output}: {len(data.prompts)} pictures of {data.codes.shape[1]} x {data.codes.shape[2]} codes")


@app.command("train-heads")
def train_heads_command(
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

    pipe = _load(model, None, device, dtype)
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


@benchmark.command("scenes")
def benchmark_scenes(
    model: Model = EMBEDDED,
    heads: Heads = None,
    num_prompts: Annotated[int, typer.Option(min=6, help="Held-out prompts, the six families in equal parts.")] = 300,
    rounds: Annotated[str, typer.Option(help="Correction rounds to try, with commas between.")] = "0,1,2",
    seed: Annotated[int, typer.Option(min=0, help="Of the first picture.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 50,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1 is none.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Six-task score of decoders: autoregressive, lossless, and speculative by number of rounds."""
    import json

    from rich.table import Table

    from ssd_pipelines.evaluation.scenes import score_scenes
    from ssd_pipelines.scenes import FAMILIES, evaluation_tasks
    from ssd_pipelines.verifiers import AutoregressiveVerifier, SpatialDraftVerifier

    if not re.fullmatch(r"\d+(,\d+)*", rounds):
        raise ValueError(f"`--rounds` takes whole numbers with commas between, like 0,1,2, got {rounds!r}.")
    pipe = _load(model, heads, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    tasks = evaluation_tasks(num_prompts, seed=seed)
    config = pipe.verifier.config
    decoders: dict[str, Verifier] = {"autoregressive": AutoregressiveVerifier.from_config(config)}
    if pipe.heads is not None:
        decoders["SSD, lossless"] = SpatialDraftVerifier.from_config(config, rounds=None, lossless=True)
        for number in rounds.split(","):
            decoders[f"SSD, {number} rounds"] = SpatialDraftVerifier.from_config(config, rounds=int(number))

    table = Table("decoder", "passes", "six-task", "±", *FAMILIES, title=f"{num_prompts} held-out prompts")
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


@benchmark.command("latency")
def benchmark_latency(
    model: Model = EMBEDDED,
    heads: Heads = None,
    prompt: Annotated[str, typer.Option(help="What is drawn.")] = "a photo of a red circle and a blue square",
    rounds: Annotated[int | None, typer.Option(min=0, help="Correction rounds. Default: the verifier's.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs, of which medians are shown.")] = 7,
    library: Annotated[bool, typer.Option(help="Compare our autoregressive loop with the library's too.")] = True,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Time at batch 1 as ratios: to autoregressive decoding, to the bare passes, and to the library's own loop."""
    from ssd_pipelines.evaluation.latency import library_ratio, measure_latency
    from ssd_pipelines.verifiers import AutoregressiveVerifier

    pipe = _load(model, heads, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    changes = {} if rounds is None else {"rounds": rounds}
    if pipe.heads is None:
        raise ValueError(f"{model} has no draft heads to speculate with: give `--heads`.")
    for name, verifier in (
        ("speculative", type(pipe.verifier).from_config(pipe.verifier.config, **changes)),
        ("autoregressive", AutoregressiveVerifier.from_config(pipe.verifier.config)),
    ):
        report = measure_latency(pipe, verifier, prompt, repeats)
        console.print(f"[bold]{name}[/]: {report.nfe} passes, on {_machine(pipe)}")
        if name == "speculative":
            console.print(f"  passes, AR / ours           {report.nfe_ratio:.2f}")
            console.print(f"  wall time, AR / ours        {report.wall_ratio:.2f}")
            console.print(f"  share of time in drafting   {report.drafting_share:.1%}")
        console.print(f"  wall time / bare passes     {report.overhead:.3f}")
        console.print(f"  the same without drafting   {report.overhead_without_drafting:.3f}")
    if library:
        console.print(f"transformers' generate / our autoregressive loop  {library_ratio(pipe, prompt, repeats):.2f}")


@benchmark.command("decoders")
def benchmark_decoders(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for figures and plot; a rerun goes on in it.")],
    model: Model = EMBEDDED,
    heads: Heads = None,
    paper_heads: Annotated[
        str | None, typer.Option(help="Heads for the paper's rows. Default: the model's own.")
    ] = None,
    preset: Annotated[Preset, typer.Option(help="A few decoders and pictures, or all of them.")] = Preset.full,
    only: Annotated[list[str] | None, typer.Option(help="Only rows whose name has this in it; repeatable.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=6, help="Default: 300, and 36 with the quick preset.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first picture.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 50,
    repeats: Annotated[int, typer.Option(min=0, help="Interleaved timings at batch 1; 0 for none.")] = 3,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Every decoder of the field on the same prompts and seeds, in one table."""
    import json

    from rich.table import Table

    from ssd_pipelines.evaluation.decoders import QUICK, all_decoders, compare_decoders, pareto_front, plot, write_csv
    from ssd_pipelines.heads import SpatialDraftHeads
    from ssd_pipelines.scenes import CHECKPOINT, evaluation_tasks

    pipe = _load(model, heads, device, dtype)
    if pipe.heads is None:
        raise ValueError(f"{model} has no draft heads to speculate with: give `--heads`.")
    if paper_heads is None and model == EMBEDDED and (CHECKPOINT / "paper_heads").is_dir():
        paper_heads = str(CHECKPOINT / "paper_heads")
    drafting = None
    if paper_heads is not None:
        drafting = SpatialDraftHeads.from_pretrained(paper_heads, dtype=pipe.backbone.dtype).to(pipe.backbone.device)
    decoders = all_decoders()
    if preset is Preset.quick:
        decoders = [decoder for decoder in decoders if decoder.name in QUICK]
    if only:
        decoders = decoders[:1] + [d for d in decoders[1:] if any(part.lower() in d.name.lower() for part in only)]
    number = num_prompts or (36 if preset is Preset.quick else 300)
    tasks = evaluation_tasks(number, seed=seed)
    figures = compare_decoders(
        pipe,
        decoders,
        tasks,
        output,
        drafting,
        seed,
        min(batch_size, number),
        min(repeats, 1 if preset is Preset.quick else repeats),
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
        title=f"{number} held-out prompts, on {_machine(pipe)}; * on the Pareto front",
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
        console.print(f"[yellow]Note:[/] {_escape(str(error))}")


@benchmark.command("cost")
def benchmark_cost(
    model: Model = EMBEDDED,
    heads: Heads = None,
    random: Annotated[
        RandomSize | None, typer.Option(help="Instead of a model: random weights of this size, no download.")
    ] = None,
    widths: Annotated[str, typer.Option(help="Positions a pass feeds, with commas between.")] = "1,4,8,16,32,48,96",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs, of which medians are shown.")] = 15,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """What wide passes and drafting cost here, in autoregressive steps."""
    import torch
    from rich.table import Table

    from ssd_pipelines.evaluation.latency import measure_width_costs

    if not re.fullmatch(r"\d+(,\d+)*", widths):
        raise ValueError(f"`--widths` takes whole numbers with commas between, like 1,8,32, got {widths!r}.")
    if random is None:
        pipe = _load(model, heads, device, dtype)
    else:
        from ssd_pipelines.testing import random_pipeline

        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        precision = dtype or (Dtype.float32 if place == "cpu" else Dtype.bfloat16)
        pipe = random_pipeline(random.value, getattr(torch, precision.value), place)
    table = Table("tokens", "a pass", "drafting them", title=f"in autoregressive steps, on {_machine(pipe)}")
    for row in measure_width_costs(pipe, [int(width) for width in widths.split(",")], repeats):
        drafting = "" if row.drafting_cost is None else f"{row.drafting_cost:.2f}"
        table.add_row(str(row.tokens), f"{row.pass_cost:.2f}", drafting)
    console.print(table)


@convert.command("lumina-mgpt")
def convert_lumina(
    source: Annotated[Path, typer.Argument(help="Folder of Alpha-VLLM/Lumina-mGPT-7B-768 or a sibling.")],
    vqgan: Annotated[Path, typer.Option(help="Meta's vqgan.ckpt, for instance of Alpha-VLLM/Chameleon_7B_mGPT.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the pipeline.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the tokenizer, which only -768 has.")] = None,
    image_size: Annotated[int | None, typer.Option(min=32, help="Side in pixels. Default: as the folder says.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights as written.")] = Dtype.bfloat16,
) -> None:
    """Make a folder that `from_pretrained` loads of a Lumina-mGPT checkpoint and Meta's picture tokenizer."""
    import torch

    from ssd_pipelines.conversion import convert_lumina_mgpt

    with _quiet_loading():
        convert_lumina_mgpt(
            source, vqgan, output, tokenizer, getattr(torch, dtype.value), image_size, report=console.print
        )


@convert.command("llamagen")
def convert_llamagen_command(
    checkpoint: Annotated[Path, typer.Argument(help="t2i_XL_stage2_512.pt or another .pt of LlamaGen.")],
    vq: Annotated[Path, typer.Option(help="vq_ds16_t2i.pt; for class-conditional models vq_ds16_c2i.pt.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the pipeline.")],
    image_size: Annotated[int, typer.Option(min=16, help="Side of its pictures in pixels: 256, 384 or 512.")],
    text_encoder: Annotated[Path | None, typer.Option(help="Folder of google/flan-t5-xl, for text models.")] = None,
    num_heads: Annotated[int | None, typer.Option(min=1, help="Default: one for 64 of the width; 3B has 32.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights as written.")] = Dtype.bfloat16,
) -> None:
    """Make a folder that `from_pretrained` loads of a LlamaGen checkpoint and its picture tokenizer."""
    import torch

    from ssd_pipelines.conversion import convert_llamagen

    with _quiet_loading():
        convert_llamagen(
            checkpoint, vq, output, image_size, text_encoder, num_heads, getattr(torch, dtype.value), console.print
        )


# --- helpers ----------------------------------------------------------------------------------------------------------


def _load(model: str, heads: str | None, device: str | None, dtype: Dtype | None) -> "SpatialSpeculativePipeline":
    import torch

    from ssd_pipelines.pipeline import SpatialSpeculativePipeline
    from ssd_pipelines.scenes import CHECKPOINT

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'`--device` must be like "cpu", "cuda" or "cuda:1", got {device!r}.') from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('`--device cuda` was asked for, but there is no usable GPU here: use "cpu".')
    if dtype is None:
        dtype = Dtype.float32 if place.type == "cpu" else Dtype.bfloat16
    with _quiet_loading():
        pipe = SpatialSpeculativePipeline.from_pretrained(
            CHECKPOINT if model == EMBEDDED else model,
            dtype=getattr(torch, dtype.value),
            **({} if heads is None else {"heads": heads}),
        )
    return pipe.to(place)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No bars and notices of the libraries while a model loads; their errors still come through."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()


def _warm_up(pipe: "SpatialSpeculativePipeline", prompt: str, guidance_scale: float | None) -> None:
    """One pass of each kind, so that the first decoder timed doesn't pay for the process's first calls."""

    def stop(pipe: Any, step: int, left: int, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= 2
        return tensors

    from ssd_pipelines.pipeline import hidden_progress_bar

    with hidden_progress_bar(pipe):
        pipe(prompt, guidance_scale=guidance_scale, callback_on_step_end=stop)


def _warn_of_unknown_words(prompts: list[str]) -> None:
    from ssd_pipelines.scenes import parse_prompt

    for prompt in prompts:
        try:
            parse_prompt(prompt)
        except ValueError as error:
            console.print(f"[yellow]Note:[/] the embedded model draws simple scenes. {_escape(str(error))}")


def _settings_of(verifier: "Verifier") -> list[str]:
    """Names of the verifier's own settings, without what its config carries along."""
    return sorted(name for name in verifier._get_init_keys(type(verifier)) if name in verifier.config)


def _summary(decoder: str, output: "SpatialSpeculativePipelineOutput") -> str:
    name = {"ssd": "spatially speculative", "ar": "autoregressive"}[decoder]
    stats = output.stats
    text = f"{name}: {stats.nfe} passes ({stats.tokens_per_pass:.1f} tokens a pass), {stats.seconds['total']:.2f} s"
    if stats.acceptance_rate is not None:
        text += f", {stats.acceptance_rate:.0%} of the drafts accepted"
    return text


def _caption(output: "SpatialSpeculativePipelineOutput", batch_size: int) -> list[str]:
    together = f" for {batch_size} pictures" if batch_size > 1 else ""
    return [f"{output.stats.nfe} passes, {output.stats.seconds['total']:.2f} s{together}"]


def _machine(pipe: "SpatialSpeculativePipeline") -> str:
    import torch

    device = pipe.backbone.device
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} in {pipe.backbone.dtype}".replace("torch.", "")
    return f"{device.type} with {torch.get_num_threads()} threads in {pipe.backbone.dtype}".replace("torch.", "")


def _training_row(row: dict[str, Any]) -> str:
    if "loss" in row:
        return f"step {row['step']} of {row['of']}: loss {row['loss']:.4f}, learning rate {row['lr']:.2e}"
    return "measuring on pictures that were kept from training"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "picture"


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
