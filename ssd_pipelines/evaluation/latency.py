"""Measure wall time as ratios: to the bare backbone passes of a decoder, and to the generation loop of transformers.

A ratio of two times that are measured alternately in one process is not affected by changes in the machine's speed; an
absolute time is.
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
    """Medians over interleaved runs that draw one picture at batch size 1.

    Attributes:
        nfe, ar_nfe: passes of the decoder and of autoregressive decoding.
        nfe_ratio: `ar_nfe / nfe`.
        seconds, ar_seconds: time of the whole call, without decoding codes to pixels.
        wall_ratio: `ar_seconds / seconds`.
        bare_seconds: time of only the same backbone passes: embedding, transformer and image head over the same
            windows.
        overhead: `seconds / bare_seconds`, including drafting.
        overhead_without_drafting: the same without the time spent on drafting: the cost of the loop itself.
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
        """Return all figures by name."""
        return asdict(self)


def describe_machine(pipe: SpatialSpeculativePipeline) -> str:
    """Return the device, threads and dtype of a pipeline as text, for results."""
    device, dtype = pipe.backbone.device, str(pipe.backbone.dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} in {dtype}"
    threads = torch.get_num_threads()
    return f"{device.type} with {threads} thread{'s' * (threads > 1)} in {dtype}"


def measure_latency(
    pipe: SpatialSpeculativePipeline, verifier: Verifier, prompt: str, repeats: int = 5, seed: int = 0
) -> LatencyReport:
    """Time `verifier`, autoregressive decoding, and the verifier's bare passes alternately.

    Args:
        pipe: the pipeline.
        verifier: the verifier to measure.
        prompt: prompt of the picture.
        repeats: rounds of all three, after one more for warm-up; medians of the per-round ratios are reported.
        seed: seed of the picture.

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
    """Return the seconds that only the backbone passes over the given windows take.

    It encodes the prompt. Then, for each window, it embeds arbitrary codes, runs the transformer on the cache, applies
    the image head to the window, and rolls the cache back.

    Args:
        pipe: the pipeline.
        prompt: the prompt.
        windows: first position and end of the window of each pass.
    """
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
        # The next pass of a wavefront may begin after the end of the cache; the cache is then shorter than in decoding.
        context.cache.truncate(min(len(context.cache), encoded.length + following))
    _synchronize(sequence.device)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class WidthCost:
    """Cost of a pass over `tokens` positions and of drafting that many cells, in passes over one position.

    Attributes:
        tokens: number of positions that the pass feeds.
        pass_cost: median time of such a pass divided by that of a pass over one position.
        drafting_cost: median time of drafting a row of `tokens` cells (heads, final norm, image head) divided by the
            same; `None` without heads.
    """

    tokens: int
    pass_cost: float
    drafting_cost: float | None


@torch.no_grad()
def measure_width_costs(
    pipe: SpatialSpeculativePipeline, widths: Sequence[int], repeats: int = 15, filled: float = 0.5
) -> list[WidthCost]:
    """Measure the cost of wide passes on this machine at batch size 1 with guidance (arXiv 2606.20543, figures 3, 4).

    Args:
        pipe: the pipeline.
        widths: numbers of positions per pass.
        repeats: interleaved runs, of which medians are taken; one more warms up.
        filled: share of the picture that is already in the cache.

    Returns:
        the cost of each width.

    Raises:
        ValueError: for a width that exceeds the rest of the picture.
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
    for _ in range(repeats + 1):  # alternately, so that changes in the machine's speed affect all widths equally
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
    """Return the time of transformers' `generate` divided by that of our autoregressive loop; above 1 ours is faster.

    Both decode greedily with the same weights and prompt. The ratio is the median over `repeats` runs.

    Raises:
        RuntimeError: if the codes of both differ.
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
            raise RuntimeError("Our greedy codes differ from those of transformers: the times can't be compared.")
        ratios.append(seconds / ours.stats.seconds["total"])
    return statistics.median(ratios[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
