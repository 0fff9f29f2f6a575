"""One process of the tests in test_processes.py: draws its share of pictures if asked to, and trains on all of them."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.training import HeadTrainingConfig, TokenGrids, draw_token_grids, train_heads


PROMPTS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square", "triangle")]


def main(folder: Path, settings: dict[str, int]) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    pipe = tiny_pipeline(side=4)
    if not (folder / "pictures" / "manifest.json").exists():
        accelerator.wait_for_everyone()
        draw_token_grids(
            pipe,
            PROMPTS,
            folder / "pictures",
            batch_size=2,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        accelerator.wait_for_everyone()
    data = TokenGrids.load(folder / "pictures")
    config = HeadTrainingConfig(
        num_horizontal=2, batch_size=4, lr=3e-3, warmup_steps=2, kl_weight=0.5, stale_share=0.3, **settings
    )
    heads = train_heads(pipe, data, config, folder / "heads", accelerator=accelerator)
    if accelerator.is_main_process:
        print("processes", heads.config.training["processes"])
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
