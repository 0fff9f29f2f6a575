"""The `ssd-pipelines` command, one file per group of commands; large libraries are imported when a command runs."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from ssd_pipelines.cli import benchmark, convert, demo, generate, heads, hub, race
from ssd_pipelines.cli.common import console, escape


app = typer.Typer(
    help="Generate pictures with autoregressive image models and spatially speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(race.race)
app.command()(demo.demo)
app.command()(heads.distill)
app.command("train-heads")(heads.train)
app.command("push-heads")(hub.push_heads)
app.command("push-pipeline")(hub.push_pipeline)
app.add_typer(benchmark.app, name="benchmark")
app.add_typer(convert.app, name="convert")


def main() -> None:
    """Run the command; errors that the user can fix are shown in one sentence, without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]Error:[/] {escape(str(error))}")
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        import ssd_pipelines

        console.print(ssd_pipelines.__version__)
        raise typer.Exit
