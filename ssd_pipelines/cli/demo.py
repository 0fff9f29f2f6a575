"""`ssd-pipelines demo`: the page on this machine."""

from typing import Annotated

import typer

from ssd_pipelines.cli.common import EMBEDDED, Device, Heads, Model, Precision, console, quiet_loading


def demo(
    model: Model = EMBEDDED,
    heads: Heads = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860 on.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Serve a page that races decoders, draws pictures and shows how they are decoded."""
    import torch

    try:
        from ssd_pipelines.demo import create_app, launch, load_model
    except ImportError as error:
        raise ValueError('The page needs gradio: pip install "ssd-pipelines[demo]".') from error
    with quiet_loading():
        loaded = load_model(
            None if model == EMBEDDED else model, heads, device, None if dtype is None else getattr(torch, dtype)
        )
    console.print(f"{loaded.name}, on {loaded.machine}. Stop with Ctrl+C.")
    launch(create_app([loaded]), host, port, inbrowser=browser)
