"""`ssd-pipelines convert`: convert checkpoints in other formats to saved pipelines."""

from pathlib import Path
from typing import Annotated

import typer

from ssd_pipelines.cli.common import Dtype, console, quiet_loading


app = typer.Typer(help="Convert checkpoints in other formats to saved pipelines.", no_args_is_help=True)


@app.command("lumina-mgpt")
def lumina_mgpt(
    source: Annotated[Path, typer.Argument(help="Folder of Alpha-VLLM/Lumina-mGPT-7B-768 or a sibling.")],
    vqgan: Annotated[Path, typer.Option(help="Meta's vqgan.ckpt, for instance from Alpha-VLLM/Chameleon_7B_mGPT.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the pipeline.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the tokenizer; only -768 contains it.")] = None,
    image_size: Annotated[int | None, typer.Option(min=32, help="Side in pixels. Default: from folder's name.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the saved backbone.")] = "bfloat16",
) -> None:
    """Convert a Lumina-mGPT checkpoint and Meta's picture tokenizer to a folder that `from_pretrained` loads."""
    import torch

    from ssd_pipelines.conversion import convert_lumina_mgpt

    with quiet_loading():
        convert_lumina_mgpt(source, vqgan, output, tokenizer, getattr(torch, dtype), image_size, report=console.print)


@app.command("llamagen")
def llamagen(
    checkpoint: Annotated[Path, typer.Argument(help="t2i_XL_stage2_512.pt or another .pt of LlamaGen.")],
    vq: Annotated[Path, typer.Option(help="vq_ds16_t2i.pt; for class-conditional models vq_ds16_c2i.pt.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the pipeline.")],
    image_size: Annotated[int, typer.Option(min=16, help="Side of its pictures in pixels: 256, 384 or 512.")],
    text_encoder: Annotated[Path | None, typer.Option(help="Folder of google/flan-t5-xl, for text models.")] = None,
    num_heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; known for released sizes.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the saved weights.")] = "bfloat16",
) -> None:
    """Convert a LlamaGen checkpoint and its picture tokenizer to a folder that `from_pretrained` loads."""
    import torch

    from ssd_pipelines.conversion import convert_llamagen

    with quiet_loading():
        convert_llamagen(
            checkpoint, vq, output, image_size, text_encoder, num_heads, getattr(torch, dtype), console.print
        )
