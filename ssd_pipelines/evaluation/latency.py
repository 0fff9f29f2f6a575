"""Wall time as ratios: decoding against the bare backbone passes that it makes, and against the library's own loop.

A ratio of two things measured in turn within one process survives a machine whose speed drifts; an absolute time
doesn't.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.pipeline_output import DecodingStats
from ssd_pipelines.verifiers import AutoregressiveVerifier, Verifier


@dataclass(frozen=True)
class LatencyReport:
    """Medians over interleaved runs of one picture at batch 1.

    Attributes:
        nfe, ar_nfe: passes of the decoder and of autoregressive decoding.
        nfe_ratio: `ar_nfe / nfe`.
        seconds, ar_seconds: of the whole call without picture decoding.
        wall_ratio: autoregressive over decoder.
        bare_seconds: the same backbone passes alone: embedding, transformer and image head over the same windows.
        overhead: `seconds / bare_seconds`, drafting included.
        overhead_without_drafting: the same without the time in draft heads: what the loop itself costs.
        drafting_share: share of `seconds` spent on drafting.
    """

    nfe: int
    ar_nfe: int
    nfe_ratio: float
    seconds: float
    ar_seconds: float
    wall_ratio: float
    bare_seconds: float
    overhead: float
    overhead_without_drafting: float
    drafting_share: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_latency(
    pipe: SpatialSpeculativePipeline, verifier: Verifier, prompt: str, repeats: int = 5, seed: int = 0
) -> LatencyReport:
    """Time `verifier`, autoregressive decoding, and the verifier's bare passes in turn.

    Args:
        repeats: rounds of the three; medians of the per-round ratios are reported. One more round warms up.

    Example:
        >>> measure_latency(pipe, SpatialDraftVerifier(rounds=2), "a photo of a red circle").overhead
    """
    autoregressive = AutoregressiveVerifier.from_config(verifier.config)
    rows = []
    for _ in range(repeats + 1):
        ours = _decode(pipe, verifier, prompt, seed)
        is_reference = type(verifier) is AutoregressiveVerifier
        reference = ours if is_reference else _decode(pipe, autoregressive, prompt, seed)
        rows.append((ours, reference, bare_pass_seconds(pipe, prompt, ours.windows)))
    rows = rows[1:]

    def median(value: Callable[[DecodingStats, DecodingStats, float], float]) -> float:
        return statistics.median(value(*row) for row in rows)

    ours, reference, _ = rows[0]
    drafting = "drafting"
    return LatencyReport(
        nfe=ours.nfe,
        ar_nfe=reference.nfe,
        nfe_ratio=reference.nfe / ours.nfe,
        seconds=median(lambda a, b, bare: a.seconds["total"]),
        ar_seconds=median(lambda a, b, bare: b.seconds["total"]),
        wall_ratio=median(lambda a, b, bare: b.seconds["total"] / a.seconds["total"]),
        bare_seconds=median(lambda a, b, bare: bare),
        overhead=median(lambda a, b, bare: a.seconds["total"] / bare),
        overhead_without_drafting=median(lambda a, b, bare: (a.seconds["total"] - a.seconds.get(drafting, 0.0)) / bare),
        drafting_share=median(lambda a, b, bare: a.seconds.get(drafting, 0.0) / a.seconds["total"]),
    )


def _decode(pipe: SpatialSpeculativePipeline, verifier: Verifier, prompt: str, seed: int) -> DecodingStats:
    before, pipe.verifier = pipe.verifier, verifier
    try:
        return pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent").stats
    finally:
        pipe.verifier = before


@torch.no_grad()
def bare_pass_seconds(pipe: SpatialSpeculativePipeline, prompt: str, windows: Sequence[tuple[int, int]]) -> float:
    """Seconds of the given passes with nothing around them: encode the prompt, then per window embed arbitrary codes,
    run the transformer on the cache, apply the image head to the window, and roll the cache back."""
    backbone = pipe.adapter()
    grid = backbone.grid()
    guided = backbone.recommended_guidance_scale > 1
    sequence = torch.zeros(1, grid.length, dtype=torch.long, device=pipe.backbone.device)
    _synchronize(sequence.device)
    begin = time.perf_counter()
    encoded = backbone.encode_prompt([prompt], None, guided)
    context = backbone.new_context(encoded, grid)
    mask = context.attention_mask
    for index, (start, stop) in enumerate(windows):
        embeddings = backbone.embed(sequence[:, start:stop], grid)
        embeddings = torch.cat([embeddings, embeddings]) if guided else embeddings
        if index == 0:
            embeddings = torch.cat([encoded.embeddings, embeddings], dim=1)
        past = len(context.cache)
        states = backbone.decoder(
            inputs_embeds=embeddings,
            attention_mask=None if mask is None else mask[:, : past + embeddings.shape[1]],
            position_ids=context.positions[:, past : past + embeddings.shape[1]],
            use_cache=True,
            **context.cache.argument(backbone.decoder),
        ).last_hidden_state
        backbone.image_head(states[:, -max(1, stop - start) :])
        following = windows[index + 1][0] if index + 1 < len(windows) else stop
        # A wavefront's next pass may begin beyond what this one wrote: then the cache is a little shorter than it was.
        context.cache.truncate(min(len(context.cache), encoded.length + following))
    _synchronize(sequence.device)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class WidthCost:
    """What a pass over `tokens` positions costs, and drafting as many, in autoregressive steps.

    Attributes:
        tokens: positions that the pass feeds.
        pass_cost: median time of such a pass over that of a pass of one position.
        drafting_cost: median time of drafting a row of so many cells (heads, final norm, image head) over the same;
            `None` without heads.
    """

    tokens: int
    pass_cost: float
    drafting_cost: float | None


@torch.no_grad()
def measure_width_costs(
    pipe: SpatialSpeculativePipeline, widths: Sequence[int], repeats: int = 15, filled: float = 0.5
) -> list[WidthCost]:
    """How dear wide passes are on this machine (figures 3 and 4 of arXiv 2606.20543), at batch 1 with guidance.

    Args:
        filled: share of the picture that lies in the cache already.

    Raises:
        ValueError: for a width that doesn't fit behind what is filled.
    """
    backbone = pipe.adapter()
    grid, device = backbone.grid(), pipe.backbone.device
    past = int(grid.length * filled)
    if not widths or min(widths) < 1 or max(widths) > grid.length - past:
        raise ValueError(f"Widths must lie between 1 and {grid.length - past}, got {list(widths)}.")
    prompt = backbone.encode_prompt(["a photo"], None, guided=True)
    context = backbone.new_context(prompt, grid)
    codes = torch.zeros(2, grid.length, dtype=torch.long, device=device)
    embeddings = backbone.embed(codes, grid)
    backbone.forward(torch.cat([prompt.embeddings, embeddings[:, :past]], dim=1), context)

    def timed(work: Callable[[int], None], width: int) -> float:
        _synchronize(device)
        begin = time.perf_counter()
        work(width)
        _synchronize(device)
        return time.perf_counter() - begin

    def passing(width: int) -> None:
        context.cache.truncate(prompt.length + past)
        backbone.logits(backbone.forward(embeddings[:, past : past + width], context))

    def drafting(width: int) -> None:
        assert pipe.heads is not None
        hidden = embeddings[:, :width]
        backbone.logits(pipe.heads(hidden, hidden, "vertical", 1).flatten(1, 2))

    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats + 1):  # in turn, so that a drifting machine is the same to all
        for width in sorted({1, *widths}):
            times.setdefault(("pass", width), []).append(timed(passing, width))
            if pipe.heads is not None:
                times.setdefault(("draft", width), []).append(timed(drafting, width))
    median = {key: statistics.median(values[1:]) for key, values in times.items()}
    step = median["pass", 1]
    return [
        WidthCost(width, median["pass", width] / step, median["draft", width] / step if pipe.heads else None)
        for width in widths
    ]


def library_ratio(pipe: SpatialSpeculativePipeline, prompt: str, repeats: int = 5) -> float:
    """Median of `time of transformers' generate / time of our autoregressive loop`, greedy, same weights and prompt.

    Above 1 our loop is the faster one. Both draw the same codes, which is checked.
    """
    backbone = pipe.adapter()
    ids = torch.tensor(backbone.branches([prompt], None, False, backbone.grid()), device=pipe.backbone.device)
    scale = backbone.recommended_guidance_scale
    greedy = AutoregressiveVerifier(temperature=0.0)
    ratios = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        theirs = pipe.backbone.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_mode="image",
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            guidance_scale=scale,
        )
        _synchronize(ids.device)
        seconds = time.perf_counter() - begin
        before, pipe.verifier = pipe.verifier, greedy
        try:
            ours = pipe(prompt, output_type="latent")
        finally:
            pipe.verifier = before
        if not torch.equal(ours.codes.flatten(1), theirs):
            raise RuntimeError("Our greedy codes differ from the library's: the comparison would be of unlike things.")
        ratios.append(seconds / ours.stats.seconds["total"])
    return statistics.median(ratios[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
