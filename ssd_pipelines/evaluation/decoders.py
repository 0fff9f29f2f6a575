"""Compare the cost and the picture quality of all decoders on the same prompts and seeds.

Quality is measured in four ways, all relative to autoregressive decoding with the same seed and coupled noise: the
share of correct pictures (six-task score), the share of equal codes, the log-likelihood of the codes under the
backbone, and the PSNR between the pictures. With a lossless coupled decoder all codes are equal.
"""

import csv
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from ssd_pipelines.evaluation.latency import measure_latency
from ssd_pipelines.evaluation.scenes import score_scenes
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.loading.fingerprint import weights_fingerprint
from ssd_pipelines.pipeline import SpatialSpeculativePipeline, hidden_progress_bar
from ssd_pipelines.sampling import guide
from ssd_pipelines.scenes import SceneTask
from ssd_pipelines.verifiers import (
    AutoregressiveVerifier,
    JacobiVerifier,
    SpatialDraftVerifier,
    Verifier,
    WavefrontVerifier,
)


@dataclass(frozen=True)
class Decoder:
    """A row of the comparison table.

    Args:
        name: name of the row.
        group: "reference", "paper", "rival", "ours" or "baseline".
        verifier: the algorithm with its settings.
        lossless: whether it keeps the autoregressive distribution.
        paper_heads: draft with the paper's heads instead of ours, if they are given.
    """

    name: str
    group: str
    verifier: Verifier
    lossless: bool = False
    paper_heads: bool = False


def all_decoders() -> list[Decoder]:
    """Return every decoder and setting of the comparison; the first is autoregressive decoding."""
    paper, ours = SpatialDraftVerifier.paper, SpatialDraftVerifier
    rows = [Decoder("AR", "reference", AutoregressiveVerifier(), lossless=True)]
    rows += [
        Decoder(f"SSD paper, r={rounds}", "paper", paper(rounds=rounds), paper_heads=True) for rounds in (0, 1, 2, 3)
    ]
    rows += [
        Decoder("1D-MTP", "rival", paper(horizontal_only=True), paper_heads=True),
        Decoder(
            "1D speculative, strict",
            "rival",
            ours(horizontal_only=True, lossless=True, coupling="residual", refresh=0),
            lossless=True,
            paper_heads=True,
        ),
    ]
    # All decoders with a window use the same window sizes.
    rows += [
        Decoder(f"SJD, window {window}", "rival", JacobiVerifier(window=window), lossless=True) for window in (16, 32)
    ]
    rows += [Decoder("SCD maximal, window 32", "rival", JacobiVerifier(32, "residual"), lossless=True)]
    rows += [
        Decoder(f"SCD gumbel, window {window}", "rival", JacobiVerifier(window, "gumbel"), lossless=True)
        for window in (32, 64, 128)
    ]
    rows += [
        Decoder("GSD, 2 neighbours", "rival", JacobiVerifier(32, "residual", num_neighbors=2)),
        Decoder(
            "LANTERN rule, 4 neighbours",
            "rival",
            ours(lossless=True, coupling="residual", num_neighbors=4, refresh=0),
            paper_heads=True,
        ),
    ]
    rows += [Decoder(f"ZipAR, lead {lead}", "rival", WavefrontVerifier(lead=lead)) for lead in (2, 4, 8)]
    rows += [
        Decoder("PJD, lead 4", "rival", WavefrontVerifier(lead=4, row_window=6)),
        Decoder("scan, heads fused", "ours", WavefrontVerifier(lead=1, fusion=0.5)),
        Decoder("scan, fused, p > 0.9", "ours", WavefrontVerifier(lead=1, fusion=0.5, confidence_threshold=0.9)),
        Decoder("copy above, r=2", "baseline", ours(rounds=2, draft="above", refresh=0)),
    ]
    rows += [
        Decoder(f"{name}, lossless", "baseline", ours(draft=draft, window=32, refresh=0, lossless=True), lossless=True)
        for name, draft in (("copy above", "above"), ("random drafts", "random"))
    ]
    rows += [Decoder(f"merged, r={rounds}", "ours", ours(rounds=rounds)) for rounds in (1, 2, 3)]
    rows += [
        Decoder("r=3, lag 2", "ours", ours(rounds=3, row_lag=2)),
        Decoder("in flight, r=8, lag 2", "ours", ours(rounds=8, row_lag=2, horizontal_rounds=3)),
        Decoder("r=1, p > 0.9", "ours", ours(rounds=1, confidence_threshold=0.9)),
        Decoder("r=2, p > 0.9", "ours", ours(rounds=2, confidence_threshold=0.9)),
        Decoder("lossless, no refresh", "ours", ours(lossless=True, refresh=0), lossless=True),
        Decoder("lossless", "ours", ours(lossless=True), lossless=True),
        Decoder("lossless, fresh noise", "ours", ours(lossless=True, coupling="residual"), lossless=True),
    ]
    rows += [
        Decoder("lossless, window 32", "ours", ours(window=32, lossless=True), lossless=True),
        Decoder("lossless, window 128", "ours", ours(window=128, lossless=True), lossless=True),
    ]
    return rows


QUICK = (
    "AR",
    "SSD paper, r=2",
    "SJD, window 16",
    "SCD gumbel, window 32",
    "ZipAR, lead 4",
    "merged, r=2",
    "lossless",
)
"""Rows of the quick preset."""


@dataclass(frozen=True)
class DecoderFigures:
    """Measured figures of one decoder.

    Attributes:
        passes: mean passes per picture at batch size 1, including the pass over the prompt.
        tokens_per_pass: sequence positions divided by passes.
        six_task, standard_error, by_family: see `SceneScore`.
        agreement: share of codes equal to those of autoregressive decoding with the same seed; it is informative to
            the extent that the decoder shares noise with autoregressive decoding.
        log_likelihood: mean log-probability of a code under the backbone in nats, with guidance and without filters.
        psnr: PSNR in dB against the autoregressive picture of the same seed, averaged over the pictures that differ;
            infinite if none differs.
        wall_ratio: wall time of autoregressive decoding divided by this decoder's, at batch size 1; `None` if not
            timed.
        drafting_share: share of the wall time at batch size 1 that is spent on drafting; `None` if not timed.
        acceptance: share of accepted draft tokens, by direction and round.
    """

    passes: float
    tokens_per_pass: float
    six_task: float
    standard_error: float
    by_family: dict[str, float]
    agreement: float
    log_likelihood: float
    psnr: float
    wall_ratio: float | None
    drafting_share: float | None
    acceptance: dict[str, float]


def compare_decoders(
    pipe: SpatialSpeculativePipeline,
    decoders: Sequence[Decoder],
    tasks: Sequence[SceneTask],
    directory: str | os.PathLike[str],
    paper_heads: SpatialDraftHeads | None = None,
    seed: int = 0,
    batch_size: int = 50,
    timed: int = 3,
    report: Callable[[str, DecoderFigures], None] | None = None,
) -> dict[str, DecoderFigures]:
    """Draw all tasks with all decoders and measure them; continues an interrupted run with the same settings.

    Rows whose decoder or draft heads have changed since then are measured again.

    Args:
        pipe: pipeline with backbone and draft heads.
        decoders: the rows. The first must be autoregressive decoding, which the others are compared with. Unset
            temperature and filters are taken from the pipeline's verifier.
        tasks: the prompts; one picture each.
        directory: output folder: one JSON file per decoder, and the codes of autoregressive decoding.
        paper_heads: draft heads for decoders with `paper_heads`.
        seed: seed of the first picture.
        batch_size: pictures drawn together.
        timed: rounds of the interleaved timing at batch size 1; 0 for no timing.
        report: is called with the name and the figures of each row when it is done.

    Returns:
        figures by name of the decoder.

    Raises:
        ValueError: if the first decoder is not autoregressive, or the folder holds figures of other settings or of
            another backbone.
    """
    if not isinstance(decoders[0].verifier, AutoregressiveVerifier):
        raise ValueError("The first decoder has to be AutoregressiveVerifier: the others are compared with it.")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "num_tasks": len(tasks),
        "seed": seed,
        "batch_size": batch_size,
        "timed": timed,
        "backbone": weights_fingerprint(pipe.backbone),
    }
    manifest = folder / "settings.json"
    if manifest.exists() and json.loads(manifest.read_text("utf-8")) != settings:
        raise ValueError(
            f"{folder} holds figures of another model or other settings ({manifest}): use an empty folder."
        )
    manifest.write_text(json.dumps(settings, indent=2), "utf-8")

    kept = (pipe.verifier, pipe.heads)
    decoders = [replace(decoder, verifier=with_sampling(decoder.verifier, kept[0])) for decoder in decoders]
    figures: dict[str, DecoderFigures] = {}
    reference: torch.Tensor | None = None
    try:
        with hidden_progress_bar(pipe):
            for decoder in tqdm(decoders, desc="Decoders", unit="decoder"):
                heads = paper_heads if decoder.paper_heads and paper_heads is not None else kept[1]
                pipe.register_modules(heads=heads)
                path = folder / f"{_file_name(decoder.name)}.json"
                description: dict[str, Any] = {
                    "verifier": type(decoder.verifier).__name__,
                    "settings": _settings(decoder.verifier),
                }
                if heads is not None and (decoder.verifier.needs_heads or decoder.verifier.config.get("fusion")):
                    description["heads"] = weights_fingerprint(heads)
                if path.exists() and (folder / "reference.safetensors").exists():
                    known = json.loads(path.read_text("utf-8"))
                    if known["decoder"] == description:
                        figures[decoder.name] = DecoderFigures(**known["figures"])
                        if report is not None:
                            report(decoder.name, figures[decoder.name])
                        continue
                score = score_scenes(pipe, decoder.verifier, tasks, seed, batch_size, decoder.name)
                codes = score.codes
                if decoder is decoders[0]:
                    save_file({"codes": codes}, folder / "reference.safetensors")
                if reference is None:
                    reference = load_file(folder / "reference.safetensors")["codes"]
                latency = measure_latency(pipe, decoder.verifier, tasks[0].prompt, timed, seed) if timed else None
                ratio = None if latency is None else 1.0 if decoder is decoders[0] else latency.wall_ratio
                same = codes == reference
                row = DecoderFigures(
                    passes=score.nfe,
                    tokens_per_pass=_length(pipe) / score.nfe,
                    six_task=score.six_task,
                    standard_error=score.standard_error,
                    by_family=score.by_family,
                    agreement=float(same.float().mean()),
                    log_likelihood=log_likelihood(pipe, codes, tasks, batch_size),
                    psnr=_psnr(pipe, codes[~same.all(2).all(1)], reference[~same.all(2).all(1)]),
                    wall_ratio=ratio,
                    drafting_share=None if latency is None else latency.drafting_share,
                    acceptance=score.acceptance,
                )
                figures[decoder.name] = row
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps({"decoder": description, "figures": vars(row)}, indent=2), "utf-8")
                partial.replace(path)
                if report is not None:
                    report(decoder.name, row)
    finally:
        pipe.verifier = kept[0]
        pipe.register_modules(heads=kept[1])
    return figures


@torch.no_grad()
def log_likelihood(
    pipe: SpatialSpeculativePipeline, codes: torch.Tensor, tasks: Sequence[SceneTask], batch_size: int = 50
) -> float:
    """Compute the mean log-probability of a code under the backbone, with guidance and without filters, in nats.

    Args:
        pipe: pipeline with the backbone.
        codes: `int64 (n, rows, columns)`, one picture per task.
        tasks: the prompts.
        batch_size: pictures per forward pass.
    """
    backbone = pipe.adapter()
    grid, scale = backbone.grid(), backbone.recommended_guidance_scale
    total = 0.0
    for start in range(0, len(tasks), batch_size):
        part = codes[start : start + batch_size].to(pipe.backbone.device)
        prompts = [task.prompt for task in tasks[start : start + batch_size]]
        hidden, _ = backbone.read(part, backbone.encode_prompt(prompts, None, scale > 1), grid)
        logits = backbone.logits(hidden.flatten(1, 2))
        logits = guide(logits, scale) if scale > 1 else logits
        total += float(logits.log_softmax(-1).gather(-1, part.flatten(1)[..., None]).double().sum())
    return total / codes.numel()


def pareto_front(figures: dict[str, DecoderFigures]) -> list[str]:
    """Return the names of the decoders on the Pareto front of passes and six-task score, in order of passes."""
    front: list[str] = []
    best = -math.inf
    for name, row in sorted(figures.items(), key=lambda item: (item[1].passes, -item[1].six_task)):
        if row.six_task > best:
            front.append(name)
            best = row.six_task
    return front


def _psnr(pipe: SpatialSpeculativePipeline, ours: torch.Tensor, reference: torch.Tensor) -> float:
    if not len(ours):
        return math.inf
    device = pipe.backbone.device
    squares = [
        (pipe.decode_latents(a.to(device), "pt") - pipe.decode_latents(b.to(device), "pt")).square().mean((1, 2, 3))
        for a, b in zip(ours.split(50), reference.split(50), strict=True)
    ]
    # Different codes can give the same pixels: limit the PSNR to 99 dB.
    return float((-10 * torch.cat(squares).clamp_min(10**-9.9).log10()).mean())


def with_sampling(verifier: Verifier, of: Verifier) -> Verifier:
    """Return the verifier with unset temperature and filters taken from the other one."""
    open_ = [name for name in ("temperature", "top_k", "top_p") if verifier.config[name] is None]
    return type(verifier).from_config(verifier.config, **{name: of.config.get(name) for name in open_})


def _length(pipe: SpatialSpeculativePipeline) -> int:
    return pipe.adapter().grid().length


def _settings(verifier: Verifier) -> dict[str, Any]:
    return {
        name: verifier.config[name]
        for name in sorted(verifier._get_init_keys(type(verifier)))
        if name in verifier.config
    }


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def write_csv(figures: dict[str, DecoderFigures], path: Path) -> None:
    """Write one line per decoder, without the figures by family and the acceptance."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        columns = [name for name in vars(next(iter(figures.values()))) if name not in ("by_family", "acceptance")]
        writer.writerow(["decoder", *columns])
        for name, row in figures.items():
            writer.writerow([name, *(getattr(row, column) for column in columns)])


def plot(figures: dict[str, DecoderFigures], groups: dict[str, str], path: Path) -> None:
    """Plot the six-task score against passes with the Pareto front, and against wall time if it was measured.

    Args:
        figures: figures by name of the decoder.
        groups: group of each decoder, which determines its colour.
        path: image file to write.

    Raises:
        ImportError: if matplotlib, part of the extra "benchmark", is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'ssd-pipelines[benchmark]'.") from error
    colours = {"reference": "black", "paper": "tab:blue", "rival": "tab:orange", "ours": "tab:red", "baseline": "grey"}
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for group, colour in colours.items():
        rows = [row for name, row in figures.items() if groups[name] == group]
        timed = [row for row in rows if row.wall_ratio]
        left.errorbar(
            [row.passes for row in rows],
            [row.six_task for row in rows],
            [row.standard_error for row in rows],
            fmt="o",
            ms=4,
            color=colour,
            elinewidth=0.7,
            label=group,
        )
        right.plot(
            [1 / row.wall_ratio for row in timed if row.wall_ratio],
            [row.six_task for row in timed],
            "o",
            ms=4,
            color=colour,
        )
    front = [figures[name] for name in pareto_front(figures)]
    left.step([row.passes for row in front], [row.six_task for row in front], where="post", color="black", lw=0.8)
    left.set(xlabel="backbone passes per picture", ylabel="six-task score", xscale="log")
    right.set(xlabel="wall time relative to autoregressive decoding")
    ticks = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    low, high = left.get_xlim()
    left.set_xticks([tick for tick in ticks if low <= tick <= high])
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter("")
    left.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
