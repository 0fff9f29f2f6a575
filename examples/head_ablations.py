"""Ablations of draft heads on the embedded model: one training run per choice of inputs, target and training data.

    ssd-pipelines distill --prompts scenes --num 1984 --batch-size 64 -o pictures
    python examples/head_ablations.py --data pictures -o examples/head_ablations.json

Every row is a training run on pictures that the model drew, with the same number of steps unless the row says
otherwise. It is measured on data that no row trained on: the expected acceptance of its heads on validation pictures,
and the passes of the lossless decoder on held-out prompts. A row that is already in the JSON is not trained again.
`--table` prints the JSON as the tables of head_ablations.md.
"""

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ssd_pipelines import SpatialDraftHeads, SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.scenes import CHECKPOINT, evaluation_tasks
from ssd_pipelines.training import HeadTrainingConfig, StateReader, TokenGrids, train_heads
from ssd_pipelines.training.distillation import lossless_verifier


STEPS, BATCH = 120, 16
PROMPTS = 48
KEPT = 32
"""Number of validation pictures, at the end of the data, that no row trains on."""

PAPER = HeadTrainingConfig(
    horizontal_rows=3,  # they draft only the first row, but are most of the computation
    batch_size=BATCH,
    lr=2e-3,
    min_lr=1e-4,
    warmup_steps=10,
    validation_prompts=0,
    log_every=60,
    checkpoint_every=10**6,
)
OURS = replace(PAPER, neighborhood="three", row_head=True, kl_weight=1.0)

ROWS: dict[str, tuple[str, HeadTrainingConfig, int, int]] = {
    # name: (table, settings, pictures, steps)
    "e -> token": ("target", replace(PAPER, inputs="embedding", target="token"), 1920, STEPS),
    "e -> h_pre": ("target", replace(PAPER, inputs="embedding"), 1920, STEPS),
    "h_pre -> h_pre": ("target", replace(PAPER, inputs="hidden"), 1920, STEPS),
    "h_post -> h_post": ("target", replace(PAPER, inputs="hidden", states="post_norm"), 1920, STEPS),
    "h_pre + e -> h_pre": ("target", PAPER, 1920, STEPS),
    "h_post + e -> h_post": ("target", replace(PAPER, states="post_norm"), 1920, STEPS),
    "h_pre + e -> token": ("target", replace(PAPER, target="token"), 1920, STEPS),
    "logit-KL with Smooth-L1": ("switch", replace(PAPER, kl_weight=1.0), 1920, STEPS),
    "vertical heads see three cells": ("switch", replace(PAPER, neighborhood="three"), 1920, STEPS),
    "a row head": ("switch", replace(PAPER, row_head=True), 1920, STEPS),
    "half the pictures with stale states": ("switch", replace(PAPER, stale_share=0.5), 1920, STEPS),
    "one gated layer shared by all heads": ("switch", replace(PAPER, shared_weights=True), 1920, STEPS),
    "three cells, row head, KL": ("switch", OURS, 1920, STEPS),
    "the same, and half the pictures with stale states": ("switch", replace(OURS, stale_share=0.5), 1920, STEPS),
    "120 pictures, one epoch": ("size", PAPER, 120, 8),
    "240 pictures, one epoch": ("size", PAPER, 240, 15),
    "480 pictures, one epoch": ("size", PAPER, 480, 30),
    "960 pictures, one epoch": ("size", PAPER, 960, 60),
    "states not normalised": ("switch", replace(PAPER, normalize_states=False), 1920, STEPS),
    "ungated (MLP)": ("switch", replace(PAPER, architecture="mlp"), 1920, STEPS),
    "linear": ("switch", replace(PAPER, architecture="linear"), 1920, STEPS),
    "120 pictures, sixteen epochs": ("size", PAPER, 120, STEPS),
    "240 pictures, eight epochs": ("size", PAPER, 240, STEPS),
}
BASE = "h_pre + e -> h_pre"
SHOWN = ("horizontal+1", "horizontal+5", "vertical+1")
BASELINES = ("codes of the row above", "bundled heads")


class RememberedStates(StateReader):
    """Caches the backbone's states in memory, because all rows read the same small set of pictures many times."""

    memory: ClassVar[dict[tuple[str, bool, bytes], tuple[torch.Tensor, torch.Tensor]]] = {}

    def states(
        self, indices: list[int], codes: torch.Tensor, unconditional: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states and embeddings of some pictures; compute only those that are not cached yet.

        Args:
            indices: the pictures' indices in the data set.
            codes: `int64 (len(indices), rows, columns)`.
            unconditional: `bool (len(indices),)`: pictures that are read with the unconditional prompt.

        Returns:
            hidden states and token embeddings, both `(len(indices), rows, columns, hidden_size)`.
        """
        keys = [
            (self.data.prompts[index], bool(dropped), picture.numpy().tobytes())
            for index, picture, dropped in zip(indices, codes, unconditional, strict=True)
        ]
        new = [k for k, key in enumerate(keys) if key not in self.memory]
        if new:
            hidden, embeddings = super().states([indices[k] for k in new], codes[new], unconditional[new])
            for k, *states in zip(new, hidden, embeddings, strict=True):
                self.memory[keys[k]] = (states[0].clone(), states[1].clone())
        found = [self.memory[key] for key in keys]
        return torch.stack([states[0] for states in found]), torch.stack([states[1] for states in found])


def subset(data: TokenGrids, pictures: int) -> TokenGrids:
    """Return the first `pictures` for training, followed by the `KEPT` validation pictures."""
    end = len(data.prompts)
    chosen = [*range(pictures), *range(end - KEPT, end)]
    return TokenGrids(data.codes[chosen], [data.prompts[k] for k in chosen], data.manifest)


def measure(pipe: SpatialSpeculativePipeline, heads: SpatialDraftHeads, draft: str = "sample") -> dict[str, Any]:
    """Count the passes of the lossless decoder, with a window of two rows, on held-out prompts.

    Args:
        pipe: the pipeline; afterwards it has `heads`.
        heads: the draft heads to measure.
        draft: where draft tokens come from, as in [`SpatialDraftVerifier`].

    Returns:
        `{"passes": [...]}`, one number per prompt.
    """
    prompts = [task.prompt for task in evaluation_tasks(PROMPTS)]
    pipe.unload_ssd_heads()
    pipe.load_ssd_heads(heads)
    before = pipe.verifier
    pipe.verifier = SpatialDraftVerifier.from_config(
        lossless_verifier(pipe, heads).config, draft=draft, window=32, refresh=2
    )
    generators = [torch.Generator().manual_seed(k) for k in range(PROMPTS)]
    stats = pipe(prompts, generator=generators, output_type="latent").stats
    pipe.verifier = before
    return {"passes": list(stats.passes)}


def run(data_folder: Path, output: Path) -> None:
    """Train and measure every row that `output` doesn't have yet, and save the JSON after each row."""
    data = TokenGrids.load(data_folder)
    pipe = SpatialSpeculativePipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    bundled = pipe.heads
    results: dict[str, Any] = json.loads(output.read_text("utf-8")) if output.exists() else {}

    def keep(name: str, row: dict[str, Any]) -> None:
        results[name] = row
        partial = output.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        partial.replace(output)

    full = subset(data, 1920)
    backbone = pipe.adapter()
    for name, (table, config, pictures, steps) in ROWS.items():
        if name in results:
            continue
        part = full if pictures == 1920 else subset(data, pictures)
        config = replace(
            config,
            epochs=steps // math.ceil(pictures / BATCH),
            warmup_steps=min(PAPER.warmup_steps, steps // 4),
            validation_share=KEPT / len(part.prompts),
            validate_every=steps,
        )
        reader = RememberedStates(backbone, backbone.grid(), part)
        with tempfile.TemporaryDirectory() as folder:
            heads = train_heads(pipe, part, config, folder, reader=reader)
        training = heads.config.training
        row = {"table": table, "pictures": pictures, "steps": training["steps"], "heads": training["validation"]}
        row["parameters"] = sum(parameter.numel() for parameter in heads.parameters() if parameter.requires_grad)
        keep(name, {**row, **measure(pipe, heads)})
    for name, draft in zip(BASELINES, ("above", "sample"), strict=True):
        if name not in results:
            keep(name, {"table": "baseline", **measure(pipe, bundled, draft)})


def tables(results: dict[str, Any]) -> str:
    """Format the results as one markdown table per group of rows.

    The difference to `BASE` is paired by prompt and seed, and has its standard error.
    """
    titles = {
        "target": "What heads see -> what they are trained to match",
        "switch": f"One choice changed in `{BASE}`",
        "size": f"How many pictures `{BASE}` learns from",
        "baseline": "Not trained here",
    }
    base = results[BASE]
    lines = []
    for group, title in titles.items():
        rows = {name: row for name, row in results.items() if row["table"] == group}
        if not rows:
            continue
        if group == "switch":
            rows = {BASE: base, **rows}
        if group == "size":
            rows = {**rows, f"{base['pictures']} pictures, one epoch": base}
        lines += [
            f"| {title} | parameters | acceptance right +1 | right +5 | below +1 | passes | difference |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            heads = row.get("heads", {})
            shown = [heads.get(head, {}).get("expected_acceptance") for head in SHOWN]
            change, error = mean_and_error([a - b for a, b in zip(row["passes"], base["passes"], strict=True)])
            cells = [name, f"{row['parameters'] / 1e6:.2f} M" if "parameters" in row else ""]
            cells += ["" if value is None else f"{value:.3f}" for value in shown]
            cells += [f"{mean_and_error(row['passes'])[0]:.1f}", "" if row is base else f"{change:+.1f} ± {error:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def mean_and_error(values: list[int]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    """Parse the command line, train the rows and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that `ssd-pipelines distill` wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--table", action="store_true", help="print the results as markdown")
    arguments = parser.parse_args()
    if arguments.data:
        run(arguments.data, arguments.output)
    if arguments.table:
        print(tables(json.loads(arguments.output.read_text("utf-8"))))


if __name__ == "__main__":
    main()
