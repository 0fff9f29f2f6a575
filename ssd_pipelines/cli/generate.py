"""`ssd-pipelines generate`: generate pictures from text."""

import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

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
    from ssd_pipelines.pipeline import SpatialSpeculativePipeline
    from ssd_pipelines.pipeline_output import SpatialSpeculativePipelineOutput
    from ssd_pipelines.verifiers import Verifier

Decoder = Literal["ssd", "ar"]


def generate(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="What to draw; several prompts form a batch.")] = None,
    model: Model = EMBEDDED,
    heads: Heads = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path("outputs"),
    num_images: Annotated[int, typer.Option("--num-images", "-n", min=1, help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="First picture's seed; the next: seed + 1.")] = 0,
    decoder: Annotated[Decoder, typer.Option(help="Speculative (ssd) or autoregressive (ar) decoding.")] = "ssd",
    rounds: Annotated[int | None, typer.Option(min=0, help="Verification rounds per row. Default: lossless.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Rows drafted together, with --rounds.")] = None,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1: no guidance.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="In pixels. Default: the model's own size.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="In pixels. Default: the model's own size.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0: argmax.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely codes; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely codes up to this probability.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also draw autoregressively, side by side.")] = False,
    like: Annotated[Path | None, typer.Option(help="Draw the picture of this PNG again, with its settings.")] = None,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Generate pictures from text and save them as PNGs with the settings they were generated with."""
    import torch

    from ssd_pipelines import __version__
    from ssd_pipelines.pictures import read_settings, save_png, side_by_side
    from ssd_pipelines.verifiers import AutoregressiveVerifier

    if like is not None:
        if prompts:
            raise ValueError("Give a prompt or `--like`, not both: the PNG contains its own prompt.")
        _check_alone(context)
        settings = read_settings(like)
        prompts, model, heads = [settings["prompt"]], settings["model"], settings["heads"]
        decoder, num_images, seed = settings["decoder"], 1, settings["seed"]
        guidance_scale, dtype = settings["guidance_scale"], settings["dtype"]
        height, width = settings.get("height"), settings.get("width")
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

    pipe = load_pipeline(model, heads, device, dtype)
    if decoder == "ssd" and pipe.heads is None:
        if rounds is not None or block_size is not None or compare:
            raise ValueError(f"{model} has no draft heads to speculate with: give `--heads`, or `--decoder ar`.")
        decoder = "ar"
    if decoder == "ar" and (rounds is not None or block_size is not None):
        raise ValueError("`--rounds` and `--block-size` belong to speculative decoding: leave out `--decoder ar`.")
    if decoder == "ar" and compare:
        raise ValueError("`--compare` compares speculative with autoregressive decoding: leave out `--decoder ar`.")
    verifier_class = AutoregressiveVerifier if decoder == "ar" else type(pipe.verifier)
    verifier = verifier_class.from_config(pipe.verifier.config, **verifier_settings)
    if model == EMBEDDED:
        _warn_of_unknown_words(prompts)

    texts = [text for text in prompts for _ in range(num_images)]
    seeds = [seed + index for index in range(len(texts))]

    def draw(which: "Verifier") -> "SpatialSpeculativePipelineOutput":
        pipe.verifier = which
        generators = [torch.Generator().manual_seed(number) for number in seeds]
        return pipe(texts, height, width, guidance_scale, generator=generators)

    if compare:
        _warm_up(pipe, texts[0], guidance_scale)
    drawn = draw(verifier)
    backbone = pipe.adapter()
    own = {name: verifier.config[name] for name in _settings_of(verifier)}
    described = {
        "version": __version__,
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "diffusers")},
        "model": model,
        "revision": getattr(backbone.model.config, "_commit_hash", None),
        "heads": heads,
        "decoder": decoder,
        "height": height,
        "width": width,
        "guidance_scale": pipe.guidance_scale,
        "dtype": str(pipe.backbone.dtype).removeprefix("torch."),
        "verifier": {**own, **asdict(verifier.sampling(backbone.recommended_sampling))},
        "nfe": drawn.stats.nfe,
    }
    names = [f"{_slug(text)}-{number}" for text, number in zip(texts, seeds, strict=True)]
    for image, text, number, name in zip(drawn.images, texts, seeds, names, strict=True):
        path = output / f"{name}.png"
        save_png(image, path, {**described, "prompt": text, "seed": number})
        console.print(f"{path}")
    console.print(_summary(decoder, drawn))
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
    console.print(f"{fewer:.1f} times fewer passes, {faster:.1f} times less time, on {machine(pipe)}")


def _check_alone(context: typer.Context) -> None:
    """Raise an error if settings were given along with `--like`, which uses the settings in the PNG.

    Raises:
        ValueError: if so; the message names them.
    """
    harmless = ("like", "output", "compare", "device")
    given = [name for name in context.params if name not in harmless and _was_given(context, name)]
    if given:
        flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in given)
        raise ValueError(f"`--like` draws the picture with its own settings: leave out {flags}.")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _warm_up(pipe: "SpatialSpeculativePipeline", prompt: str, guidance_scale: float | None) -> None:
    """Run a few passes, so that the time of the first decoder does not include the start-up of the process."""

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
            console.print(f"[yellow]Note:[/] the embedded model draws simple scenes. {escape(str(error))}")


def _settings_of(verifier: "Verifier") -> list[str]:
    """Return the names of the verifier's own settings, without the other entries of its config."""
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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "picture"
