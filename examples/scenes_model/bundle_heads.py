"""Add trained draft heads to an exported checkpoint, in half precision.

    ssd-pipelines distill --model my_checkpoint --prompts scenes --num 8192 --batch-size 64 -o run/pictures
    ssd-pipelines train-heads --model my_checkpoint --data run/pictures -o run/heads --horizontal-rows 3 --epochs 5 \\
        --batch-size 32 --lr 2e-3 --min-lr 4e-5 --stale-share 0.5 --validation-share 0.01 --checkpoint-every 100
    python examples/scenes_model/bundle_heads.py --heads run/heads --checkpoint my_checkpoint

The bundled heads come from these commands, run on the bundled model with the first 6,272 pictures (`--partial`): 49
minutes of training on one core. The paper's heads, which are bundled too (`--folder paper_heads`), were trained by an
earlier version of this recipe, on 1,984 pictures in 5 epochs at the same learning rates, with the paper's inputs and
loss and two vertical offsets.
"""

import argparse
import json
from pathlib import Path

from ssd_pipelines import SpatialDraftHeads
from ssd_pipelines.scenes import CHECKPOINT


def main() -> None:
    """Parse the command line and write the heads into the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, required=True, help="folder that `train-heads` wrote")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="the scenes model")
    parser.add_argument("--folder", default="heads", help="subfolder of the checkpoint for the heads")
    arguments = parser.parse_args()

    heads = SpatialDraftHeads.from_pretrained(arguments.heads)
    heads.half().save_pretrained(arguments.checkpoint / arguments.folder)
    # The backbone is in the same checkpoint. The path that the heads were trained from is of no use on other machines.
    settings = arguments.checkpoint / arguments.folder / "config.json"
    config = json.loads(settings.read_text("utf-8")) | {"base_model": None}
    config.pop("_name_or_path", None)
    settings.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if arguments.folder == "heads":
        index = arguments.checkpoint / "model_index.json"
        components = json.loads(index.read_text("utf-8")) | {"heads": ["ssd_pipelines", "SpatialDraftHeads"]}
        index.write_text(json.dumps(components, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
