"""`ssd-pipelines race`: decoders side by side on one clock, as an animation."""

from pathlib import Path
from typing import Annotated

import typer

from ssd_pipelines.cli.common import EMBEDDED, Device, Heads, Model, Precision, console, load_pipeline, machine


def race(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .gif or .mp4 file, or .json for the page's player.")
    ] = Path("race.gif"),
    model: Model = EMBEDDED,
    heads: Heads = None,
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="The same for all decoders.")] = 0,
    decoder: Annotated[
        list[str] | None,
        typer.Option(help="Name as in `benchmark decoders`, repeatable; the autoregressive one always runs."),
    ] = None,
    guidance_scale: Annotated[float | None, typer.Option("--guidance-scale", "-g", help="1 is none.")] = None,
    length: Annotated[float, typer.Option(min=0.5, max=120, help="Seconds that the slowest decoder takes.")] = 8.0,
    fps: Annotated[int, typer.Option(min=1, max=50, help="Frames per second.")] = 15,
    size: Annotated[int, typer.Option(min=32, max=1024, help="Width of each picture in pixels.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Recordings per decoder; the median time is shown.")] = 3,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Record decoders one after the other, and write an animation that replays them side by side."""
    from rich.table import Table

    from ssd_pipelines.race import race_decoders, record_race, write_animation, write_replay
    from ssd_pipelines.race.animation import check_ending

    as_json = output.suffix.lower() == ".json"
    if not as_json:
        check_ending(output)
    pipe = load_pipeline(model, heads, device, dtype)
    described = machine(pipe)
    recorded = record_race(
        pipe,
        race_decoders(pipe, decoder),
        prompt,
        seed,
        model="the embedded model" if model == EMBEDDED else model,
        machine=described,
        repeats=repeats,
        guidance_scale=guidance_scale,
    )
    if as_json:
        write_replay(recorded, output)
    else:
        write_animation(recorded, output, length, fps=fps, size=size)
    table = Table("decoder", "passes", "seconds", "time, AR / decoder", "codes equal AR's", title=f"on {described}")
    first = recorded.recordings[0]
    for recording in recorded.recordings:
        table.add_row(
            recording.title,
            str(len(recording.passes)),
            f"{recording.seconds:.2f}",
            f"{first.seconds / recording.seconds:.1f}",
            "yes" if recording.matches_reference else "no",
        )
    console.print(table)
    console.print(f"{output}")
