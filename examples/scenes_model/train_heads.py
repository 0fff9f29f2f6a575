"""Trains draft heads for the scenes model on pictures that it draws itself, with the package's own head training.

    python examples/scenes_model/train_heads.py --run run/heads

The bundled heads come from `--pictures 1984 --epochs 8 --kl-weight 1 --horizontal-rows 3`, the paper's beside them from
`--pictures 1984 --epochs 5 --neighborhood cell --no-row-head --num-vertical 2 --folder paper_heads`; more is better.

Both stages go on where a killed run stopped. The heads land in the checkpoint's `heads` folder, beside the verifier's
settings and the index that make the folder a saved pipeline.
"""

import argparse
import json
from pathlib import Path
from random import Random

from ssd_pipelines import SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.scenes import CHECKPOINT, SceneOptions, sample_scene
from ssd_pipelines.training import HeadTrainingConfig, draw_token_grids, train_heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder for the drawn pictures and checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="the scenes model")
    parser.add_argument("--pictures", type=int, default=6000, help="how many pictures the model draws to learn from")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--kl-weight", type=float, default=0.0)
    parser.add_argument("--num-vertical", type=int, default=1)
    parser.add_argument("--neighborhood", choices=("cell", "three"), default="three")
    parser.add_argument("--no-row-head", action="store_true")
    parser.add_argument("--folder", default="heads", help="where the heads go in the checkpoint")
    parser.add_argument("--horizontal-rows", type=int, help="rows that horizontal heads learn from; all by default")
    parser.add_argument("--draw", metavar="K/N", help="only draw, as process K (from 0) of N with the same folder")
    parser.add_argument("--top-p", type=float, default=0.95, help="of the drawn pictures and the bundled verifier")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    random = Random(arguments.seed)
    options = SceneOptions(dense=0.25)
    prompts = [sample_scene(random, options).prompt for _ in range(arguments.pictures)]
    pipe = SpatialSpeculativePipeline.from_pretrained(arguments.checkpoint, heads=None)
    pipe.verifier = SpatialDraftVerifier(top_p=arguments.top_p)
    index, processes = map(int, (arguments.draw or "0/1").split("/"))
    data = draw_token_grids(
        pipe,
        prompts,
        arguments.run / "pictures",
        batch_size=64,
        seed=arguments.seed,
        process_index=index,
        num_processes=processes,
    )
    if arguments.draw:
        return

    config = HeadTrainingConfig(
        num_vertical=arguments.num_vertical,
        neighborhood=arguments.neighborhood,
        row_head=not arguments.no_row_head,
        horizontal_rows=arguments.horizontal_rows,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=arguments.lr,
        min_lr=arguments.lr / 50,
        kl_weight=arguments.kl_weight,
        validation_share=0.01,
        seed=arguments.seed,
    )
    heads = train_heads(pipe, data, config, arguments.run / arguments.folder)
    print(json.dumps(heads.config.training["validation"], indent=2))

    # A flat folder of a transformers model becomes a saved pipeline by an index: components without a folder of their
    # own are read from the root.
    heads.register_to_config(base_model=None)
    heads.half().save_pretrained(arguments.checkpoint / arguments.folder)
    verifier = pipe.verifier
    verifier.save_pretrained(arguments.checkpoint / "verifier")
    index = {
        "_class_name": "SpatialSpeculativePipeline",
        "_diffusers_version": verifier.config["_diffusers_version"],
        "backbone": ["transformers", "JanusForConditionalGeneration"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "heads": ["ssd_pipelines", "SpatialDraftHeads"],
        "verifier": ["ssd_pipelines", "SpatialDraftVerifier"],
    }
    (arguments.checkpoint / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
