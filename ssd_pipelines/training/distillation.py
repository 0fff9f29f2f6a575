"""Self-distillation data: token grids that the backbone itself draws from a list of prompts.

Source: arXiv 2606.20543, appendix A.1. The heads learn to foresee the states that the backbone goes through when it
draws, so the pictures are its own, with its own recommended sampling.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from ssd_pipelines.pipeline import SpatialSpeculativePipeline, hidden_progress_bar
from ssd_pipelines.verifiers import AutoregressiveVerifier


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TokenGrids:
    """Pictures as codes, `int64 (n, rows, columns)`, and their prompts."""

    codes: torch.Tensor
    prompts: list[str]

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "TokenGrids":
        """Read all shards of a folder that `draw_token_grids` wrote.

        Raises:
            ValueError: if there are none.
        """
        shards = sorted(Path(directory).glob("shard-*.safetensors"))
        if not shards:
            raise ValueError(f"{directory} has no shard-*.safetensors: draw pictures into it first.")
        codes = torch.cat([load_file(shard)["codes"] for shard in shards]).long()
        prompts = [text for shard in shards for text in json.loads(shard.with_suffix(".json").read_text("utf-8"))]
        return cls(codes, prompts)


def draw_token_grids(
    pipe: SpatialSpeculativePipeline,
    prompts: Sequence[str],
    directory: str | os.PathLike[str],
    batch_size: int = 32,
    seed: int = 0,
    guidance_scale: float | None = None,
    process_index: int = 0,
    num_processes: int = 1,
) -> TokenGrids:
    """Draw a picture for every prompt autoregressively and keep its codes; goes on where a killed run stopped.

    Args:
        pipe: whose backbone draws, with the sampling settings of its verifier.
        prompts: one picture each.
        directory: one safetensors shard a batch, its prompts beside it, and a manifest of the settings.
        batch_size: pictures drawn together, and the length of a shard.
        seed: picture k draws from a generator of seed `seed + k`, so neither the batch size nor a restart matters.
        guidance_scale: by default the backbone's recommended one.
        process_index, num_processes: of several that draw into the same folder, each its share of the shards.

    Returns:
        all that the folder holds by then.

    Raises:
        ValueError: if the folder holds pictures of another backbone or other settings.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    verifier = AutoregressiveVerifier.from_config(pipe.verifier.config)
    settings = {
        "backbone": str(pipe.backbone.config.name_or_path),
        "seed": seed,
        "batch_size": batch_size,
        "guidance_scale": guidance_scale,
        **{name: verifier.config[name] for name in ("temperature", "top_k", "top_p")},
    }
    manifest = folder / MANIFEST
    if manifest.exists() and json.loads(manifest.read_text("utf-8")) != settings:
        raise ValueError(f"{folder} holds pictures drawn with other settings ({manifest}): use an empty folder.")
    manifest.write_text(json.dumps(settings, indent=2), "utf-8")

    before, pipe.verifier = pipe.verifier, verifier
    try:
        own = range(process_index * batch_size, len(prompts), num_processes * batch_size)
        for start in tqdm(own, desc="Drawing", unit="batch"):
            shard = folder / f"shard-{start:08d}.safetensors"
            texts = list(prompts[start : start + batch_size])
            if shard.exists() and json.loads(shard.with_suffix(".json").read_text("utf-8")) == texts:
                continue
            generators = [torch.Generator().manual_seed(seed + start + k) for k in range(len(texts))]
            with hidden_progress_bar(pipe):
                codes = pipe(texts, generator=generators, guidance_scale=guidance_scale, output_type="latent").codes
            shard.with_suffix(".json").write_text(json.dumps(texts), "utf-8")
            # The shard itself comes last and whole: its presence says that the batch is complete.
            partial = shard.with_suffix(".partial")
            save_file({"codes": codes.int().cpu()}, partial)
            partial.replace(shard)
    finally:
        pipe.verifier = before
    return TokenGrids.load(folder)
