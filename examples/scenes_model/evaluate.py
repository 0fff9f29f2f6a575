"""Score an exported checkpoint by family with autoregressive decoding, or search sampling settings on validation tasks.

    python examples/scenes_model/evaluate.py --checkpoint ssd_pipelines/scenes/checkpoint --num 300
    python examples/scenes_model/evaluate.py --checkpoint my_checkpoint --num 120 --validation \\
        --guidance-scale 1.5 3 5 --temperature 0.8 1.0

Validation tasks are combinations from the training set, so that the settings are not chosen on the evaluation tasks.
"""

import argparse
from itertools import product
from pathlib import Path

import torch
from common import seeded
from PIL import Image

from ssd_pipelines import AutoregressiveVerifier, SpatialSpeculativePipeline
from ssd_pipelines.evaluation.scenes import score_scenes
from ssd_pipelines.scenes import CHECKPOINT, FAMILIES, SceneTask, all_tasks, evaluation_tasks, is_held_out


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--validation", action="store_true", help="use combinations from the training set")
    parser.add_argument("--guidance-scale", type=float, nargs="+", help="default: the checkpoint's own")
    parser.add_argument("--temperature", type=float, nargs="+", help="default: the checkpoint's own")
    parser.add_argument("--top-p", type=float, nargs="+", help="default: the checkpoint's own")
    parser.add_argument("--pictures", type=Path, help="save the first pictures as one image to this path")
    return parser.parse_args()


def validation_tasks(number: int, seed: int) -> list[SceneTask]:
    """Return tasks from the training set, balanced over families; the held-out evaluation tasks stay unused."""
    random = seeded(seed, "validation")
    decks = {family: [task for task in all_tasks(family) if not is_held_out(task)] for family in FAMILIES}
    return [random.choice(decks[FAMILIES[k % len(FAMILIES)]]) for k in range(number)]


def main() -> None:
    """Print the score for every combination of the sampling settings."""
    args = arguments()
    torch.set_num_threads(1)
    pipe = SpatialSpeculativePipeline.from_pretrained(args.checkpoint, heads=None)
    pipe.set_progress_bar_config(disable=True)
    own = pipe.verifier.config
    tasks = (validation_tasks if args.validation else evaluation_tasks)(args.num, args.seed)
    for guidance, temperature, top_p in product(
        args.guidance_scale or [pipe.adapter().recommended_guidance_scale],
        args.temperature or [own.temperature],
        args.top_p or [own.top_p],
    ):
        verifier = AutoregressiveVerifier(temperature=temperature, top_p=top_p)
        score = score_scenes(pipe, verifier, tasks, args.seed, args.batch, guidance_scale=guidance)
        if args.pictures:
            images = pipe.decode_latents(score.codes[: args.batch])
            tiles = [image.resize((128, 128), Image.Resampling.NEAREST) for image in images]
            sheet = Image.new("RGB", (6 * 130, (len(tiles) + 5) // 6 * 130), "white")
            for index, tile in enumerate(tiles):
                sheet.paste(tile, (index % 6 * 130, index // 6 * 130))
            sheet.save(args.pictures)
        by_family = " ".join(f"{family}={score.right[family]}/{score.drawn[family]}" for family in FAMILIES)
        print(
            f"guidance={guidance} temperature={temperature} top_p={top_p}: {score.six_task:.3f} ({by_family})",
            flush=True,
        )


if __name__ == "__main__":
    main()
