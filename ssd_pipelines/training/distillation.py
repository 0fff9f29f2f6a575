"""Self-distillation data: token grids that the backbone itself generates from a list of prompts.

Source: arXiv 2606.20543, appendix A.1. The heads learn to predict the states of the backbone while it generates, so the
training pictures are its own, sampled with its recommended settings.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from tqdm.auto import tqdm

from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.loading.fingerprint import weights_fingerprint
from ssd_pipelines.pipeline import SpatialSpeculativePipeline, hidden_progress_bar
from ssd_pipelines.verifiers import AutoregressiveVerifier, SpatialDraftVerifier, Verifier


MANIFEST = "manifest.json"
METADATA = "drawn"
"""Key in a shard's header that holds its prompts and settings; one entry, as the order of several is not fixed."""
DecoderName = Literal["auto", "autoregressive", "speculative"]

_NOT_SETTINGS = ("pictures", "decoder", "backbone", "revision")
"""Entries of the manifest that may differ when drawing is resumed. The fingerprint of the weights may not."""


@dataclass(frozen=True)
class TokenGrids:
    """Pictures as codes, with their prompts and the settings that they were drawn with.

    Args:
        codes: `int64 (n, rows, columns)`.
        prompts: one per picture.
        manifest: content of the manifest.
    """

    codes: torch.Tensor
    prompts: list[str]
    manifest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], partial: bool = False) -> "TokenGrids":
        """Read all shards of a folder that `draw_token_grids` wrote.

        Args:
            directory: the folder.
            partial: accept a folder with fewer pictures than its manifest states.

        Raises:
            ValueError: if there is no shard or manifest, or there are fewer pictures than the manifest states.
        """
        shards = sorted(Path(directory).glob("shard-*.safetensors"))
        if not shards:
            raise ValueError(f"{directory} has no shard-*.safetensors: draw pictures into it first.")
        path = Path(directory) / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{directory} has shards but no {MANIFEST}, which says what model drew them: draw them again."
            )
        manifest = json.loads(path.read_text("utf-8"))
        codes, prompts = [], []
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                codes.append(file.get_tensor("codes").long())
                prompts += json.loads(file.metadata()[METADATA])["prompts"]
        if len(prompts) < manifest["pictures"] and not partial:
            raise ValueError(
                f"{directory} holds {len(prompts)} of {manifest['pictures']} pictures: run `distill` again, which "
                "continues where it stopped, or accept fewer pictures (`--partial`)."
            )
        return cls(torch.cat(codes), prompts, manifest)

    def digest(self) -> str:
        """Return a sha256 digest of codes and prompts, to compare data sets."""
        digest = hashlib.sha256(self.codes.int().contiguous().numpy().tobytes())
        digest.update(json.dumps(self.prompts).encode())
        return digest.hexdigest()


def draw_token_grids(
    pipe: SpatialSpeculativePipeline,
    prompts: Sequence[str],
    directory: str | os.PathLike[str],
    batch_size: int = 32,
    seed: int = 0,
    guidance_scale: float | None = None,
    process_index: int = 0,
    num_processes: int = 1,
    decoder: DecoderName = "auto",
) -> TokenGrids:
    """Draw a picture for every prompt and save its codes; an interrupted run is continued.

    Args:
        pipe: pipeline with the backbone; its verifier gives the sampling settings.
        prompts: one per picture.
        directory: output folder: one safetensors shard per batch, with its prompts, and a manifest of the settings.
        batch_size: number of pictures that are drawn together, and that a shard holds.
        seed: picture k is drawn with a generator of seed `seed + k`, so batch size and restarts do not change it.
        guidance_scale: by default the backbone's recommended one.
        process_index, num_processes: index and number of processes that draw into the same folder; each draws its
            share of the shards.
        decoder: "autoregressive"; or "speculative", lossless decoding with the pipeline's draft heads, which gives the
            same pictures (in float32 the same codes) and is faster if the number of passes limits the speed. "auto"
            uses heads on a GPU if the pipeline has some.

    Returns:
        all pictures in the folder, including those of other processes so far.

    Raises:
        ValueError: if there are no prompts, or the folder holds pictures of another backbone, other settings or other
            prompts.
    """
    if batch_size < 1 or not prompts:
        raise ValueError(
            f"Drawing needs at least one prompt and a batch size of 1, got {len(prompts)} and {batch_size}."
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    verifier = _drawing_verifier(pipe, decoder)
    manifest = _manifest(pipe, verifier, seed, batch_size, guidance_scale, len(prompts))
    _check_manifest(folder, manifest)
    _replace(folder / MANIFEST, json.dumps(manifest, indent=2).encode())

    own = {
        folder / f"shard-{start:08d}.safetensors": (start, list(prompts[start : start + batch_size]))
        for start in range(process_index * batch_size, len(prompts), num_processes * batch_size)
    }
    done = sum(len(texts) for shard, (_, texts) in own.items() if _holds(shard, texts))
    bar = tqdm(
        total=sum(len(texts) for _, texts in own.values()),
        initial=done,
        desc="Drawing" if num_processes == 1 else f"Drawing, first of {num_processes} processes",
        unit="picture",
        disable=process_index > 0,
    )
    before, pipe.verifier = pipe.verifier, verifier
    try:
        for shard, (start, texts) in own.items():
            if _holds(shard, texts):
                continue
            generators = [torch.Generator().manual_seed(seed + start + k) for k in range(len(texts))]
            with hidden_progress_bar(pipe):
                codes = pipe(texts, generator=generators, guidance_scale=guidance_scale, output_type="latent").codes
            about = {METADATA: json.dumps({"prompts": texts, "settings": manifest})}
            _replace(shard, save({"codes": codes.int().cpu()}, metadata=about))
            bar.update(len(texts))
    finally:
        pipe.verifier = before
        bar.close()
    return TokenGrids.load(folder, partial=True)


def lossless_verifier(pipe: SpatialSpeculativePipeline, heads: SpatialDraftHeads) -> SpatialDraftVerifier:
    """Return a lossless verifier that drafts with `heads` and has the sampling settings of the pipeline's verifier.

    If the pipeline's verifier is a lossless `SpatialDraftVerifier`, its other settings are kept too.

    Args:
        pipe: the pipeline.
        heads: the draft heads; block sizes are limited to the number of heads.
    """
    config = pipe.verifier.config
    own = isinstance(pipe.verifier, SpatialDraftVerifier) and pipe.verifier.is_lossless
    settings = dict(config) if own else {name: config[name] for name in ("temperature", "top_k", "top_p")}
    settings |= {
        "coupling": "gumbel",
        "block_size": min(settings.get("block_size", 1), heads.config.num_vertical),
        "horizontal_block": min(settings.get("horizontal_block", 5), heads.config.num_horizontal),
    }
    return SpatialDraftVerifier.from_config(settings)


def _drawing_verifier(pipe: SpatialSpeculativePipeline, decoder: DecoderName) -> Verifier:
    if decoder not in ("auto", "autoregressive", "speculative"):
        raise ValueError(f'`decoder` must be "auto", "autoregressive" or "speculative", got {decoder!r}.')
    if decoder == "speculative" and pipe.heads is None:
        raise ValueError('Drawing speculatively needs draft heads: load some, or use `decoder="auto"`.')
    # On a CPU every position of a window costs time: with the embedded model, heads save time at batch size 8, not 32.
    if decoder == "speculative" or (decoder == "auto" and pipe.heads is not None and pipe.device.type != "cpu"):
        assert pipe.heads is not None, "checked above"
        verifier = lossless_verifier(pipe, pipe.heads)
        # In large batches every position costs time: on a CPU, 32 pictures took 1.8 times as long with a window of 64
        # as with 32.
        narrow = verifier.config.window or 2 * pipe.adapter().grid().stride
        return SpatialDraftVerifier.from_config(verifier.config, window=narrow)
    return AutoregressiveVerifier.from_config(pipe.verifier.config, coupling="gumbel")


def _manifest(
    pipe: SpatialSpeculativePipeline, verifier: Verifier, seed: int, batch_size: int, guidance: float | None, num: int
) -> dict[str, Any]:
    """Return all settings that affect the codes, and the model that draws them."""
    backbone = pipe.adapter()
    grid, sampling = backbone.grid(), verifier.sampling(backbone.recommended_sampling)
    return {
        "backbone": backbone.name_or_path,
        "revision": getattr(backbone.model.config, "_commit_hash", None),
        "fingerprint": weights_fingerprint(backbone.model),
        "architecture": backbone.architecture,
        "dtype": str(backbone.model.dtype).removeprefix("torch."),
        "rows": grid.rows,
        "columns": grid.columns,
        "image_vocab_size": backbone.image_vocab_size,
        "seed": seed,
        "batch_size": batch_size,
        "guidance_scale": backbone.recommended_guidance_scale if guidance is None else guidance,
        **{name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")},
        "decoder": type(verifier).__name__,
        "pictures": num,
    }


def _check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    path = folder / MANIFEST
    if not path.exists():
        return
    there = json.loads(path.read_text("utf-8"))
    different = [
        f"{name} {there.get(name)} there, {manifest[name]} here"
        for name in manifest
        if name not in _NOT_SETTINGS and there.get(name) != manifest[name]
    ]
    if different:
        raise ValueError(
            f"{folder} holds pictures drawn by another model or with other settings ({'; '.join(different)}): use an "
            "empty folder."
        )


def _holds(shard: Path, texts: list[str]) -> bool:
    """Whether a shard exists and is complete; a shorter one, from a run with fewer prompts, is redrawn."""
    if not shard.exists():
        return False
    with safe_open(shard, framework="pt") as file:
        there = json.loads(file.metadata()[METADATA])["prompts"]
    if there[: len(texts)] != texts[: len(there)]:
        raise ValueError(f"{shard} was drawn from other prompts than these: use an empty folder.")
    return len(there) >= len(texts)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically, even if other processes write the same one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
