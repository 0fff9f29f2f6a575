"""Recording of a decoding run: after each pass, which cells of the token grid changed, which are final, and the time.

The decoders of a race run one after the other, since two that run at the same time slow each other down. Each one is
timed without the work of recording, and their recordings are replayed together.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from ssd_pipelines.evaluation.decoders import Decoder, all_decoders, with_sampling
from ssd_pipelines.pipeline import SpatialSpeculativePipeline, hidden_progress_bar


TITLES = {
    "AR": "Autoregressive",
    "SJD, window 32": "Jacobi (SJD)",
    "ZipAR, lead 4": "ZipAR",
    "SSD paper, r=2": "SSD, paper",
    "lossless": "SSD, lossless",
}
"""The decoders of a race by default, by their names in `ssd-pipelines benchmark decoders`, with shorter titles."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass changed.

    Args:
        seconds: since the start of the call, at the end of the pass.
        cells: `int64 (n,)`: indices `row * columns + column` of the cells whose code or finality changed.
        codes: `int64 (n,)`: their codes now.
        final: `bool (n,)`: whether they are final now.
    """

    seconds: float
    cells: np.ndarray
    codes: np.ndarray
    final: np.ndarray


@dataclass
class Recording:
    """One decoder drawing one picture.

    Attributes:
        title: of the decoder.
        lossless: whether it promises the autoregressive distribution.
        rows, columns: of the token grid.
        passes: one record per backbone pass, the prompt's included.
        tokens: sequence positions of a picture.
        pictures: what the codes after some passes decode to, by index of the pass; the last pass is always there.
        matches_reference: whether the final codes are those of the first decoder of the race.
    """

    title: str
    lossless: bool
    rows: int
    columns: int
    passes: list[PassRecord]
    tokens: int
    pictures: dict[int, Image.Image] = field(default_factory=dict)
    matches_reference: bool = False

    @property
    def seconds(self) -> float:
        """Of all passes, with encoding the prompt, without decoding the codes to pixels."""
        return self.passes[-1].seconds

    def passes_until(self, seconds: float) -> int:
        """How many passes were done at a time since the start."""
        return int(np.searchsorted([record.seconds for record in self.passes], seconds, side="right"))

    def after(self, passes: int) -> tuple[np.ndarray, np.ndarray]:
        """The token grid after so many passes.

        Returns:
            codes `int64 (rows, columns)`, -1 where there is none yet, and `bool (rows, columns)`: which are final.
        """
        codes = np.full(self.rows * self.columns, -1, np.int64)
        final = np.zeros(self.rows * self.columns, bool)
        for record in self.passes[:passes]:
            codes[record.cells], final[record.cells] = record.codes, record.final
        return codes.reshape(self.rows, self.columns), final.reshape(self.rows, self.columns)

    def changed_by(self, index: int) -> np.ndarray:
        """`bool (rows, columns)`: cells whose code pass `index` replaced by another one."""
        before, after = self.after(index)[0], self.after(index + 1)[0]
        return (before >= 0) & (before != after)

    def first_final(self) -> np.ndarray:
        """`int64 (rows, columns)`: the pass, from 1, after which each cell was final."""
        known = np.zeros(self.rows * self.columns, np.int64)
        for number, record in enumerate(self.passes, 1):
            new = record.cells[record.final]
            known[new] = np.where(known[new] == 0, number, known[new])
        return known.reshape(self.rows, self.columns)

    def first_drawn(self) -> np.ndarray:
        """`int64 (rows, columns)`: the pass, from 1, after which each cell had a code for the first time."""
        known = np.zeros(self.rows * self.columns, np.int64)
        for number, record in enumerate(self.passes, 1):
            known[record.cells] = np.where(known[record.cells] == 0, number, known[record.cells])
        return known.reshape(self.rows, self.columns)

    def rounds(self) -> np.ndarray:
        """`int64 (rows, columns)`: passes between the first draft of a cell and its final code; 0 without a draft."""
        return self.first_final() - self.first_drawn()

    def corrections(self) -> np.ndarray:
        """`int64 (rows, columns)`: how often the code of each cell was replaced by another one."""
        codes = np.full(self.rows * self.columns, -1, np.int64)
        counts = np.zeros(self.rows * self.columns, np.int64)
        for record in self.passes:
            counts[record.cells] += (codes[record.cells] >= 0) & (codes[record.cells] != record.codes)
            codes[record.cells] = record.codes
        return counts.reshape(self.rows, self.columns)


@dataclass(frozen=True)
class Race:
    """Several decoders drawing the same prompt with the same seed.

    Args:
        prompt, seed: what was drawn.
        model: name of the backbone.
        machine: what it ran on, in words.
        recordings: the first is the reference.
    """

    prompt: str
    seed: int
    model: str
    machine: str
    recordings: tuple[Recording, ...]


class RaceStopped(Exception):
    """Raised by `record` and `record_race` when `on_pass` asks to stop."""


def race_decoders(pipe: SpatialSpeculativePipeline, names: Sequence[str] | None = None) -> list[tuple[str, Decoder]]:
    """The decoders of a race with their titles; autoregressive decoding is always the first.

    Args:
        names: as in `ssd-pipelines benchmark decoders`. By default those in `TITLES`, without the ones that need draft
            heads if the pipeline has none.

    Raises:
        ValueError: for an unknown name, or a decoder that needs draft heads where there are none.
    """
    known = {decoder.name: decoder for decoder in all_decoders()}
    if names is None:
        usable = [name for name in TITLES if pipe.heads is not None or not known[name].verifier.needs_heads]
    else:
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"Unknown decoder {', '.join(unknown)}: choose from {'; '.join(known)}.")
        without = [name for name in names if pipe.heads is None and known[name].verifier.needs_heads]
        if without:
            raise ValueError(f"{', '.join(without)} needs draft heads, and the model has none: load heads first.")
        usable = ["AR", *(name for name in dict.fromkeys(names) if name != "AR")]
    return [(TITLES.get(name, name), known[name]) for name in usable]


def record(
    pipe: SpatialSpeculativePipeline,
    decoder: Decoder,
    prompt: str,
    seed: int = 0,
    title: str | None = None,
    on_pass: Callable[[int, int], bool] | None = None,
    **call: Any,
) -> Recording:
    """Draw a picture and record every pass.

    Args:
        title: of the recording; by default the decoder's name.
        on_pass: is called after each pass with the number of passes made and of those left, at most. It returns
            `True` to stop.
        call: further arguments of the pipeline's call, like `guidance_scale`.

    Raises:
        RaceStopped: if `on_pass` asked to stop.

    Example:
        >>> recording = record(pipe, all_decoders()[0], "a red circle")
        >>> len(recording.passes), recording.first_final().max()
        (256, 256)
    """
    device = pipe.backbone.device
    records: list[PassRecord] = []
    codes, final, overhead = np.empty(0), np.empty(0), 0.0

    def note(pipe: SpatialSpeculativePipeline, step: int, left: int, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal codes, final, overhead
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        new = tensors["latents"][0].cpu().numpy().ravel()
        new_final = (new >= 0) & ~tensors["drafted"][0].cpu().numpy().ravel()
        if not records:
            codes, final = np.full_like(new, -1), np.zeros_like(new_final)
        cells = np.flatnonzero((new >= 0) & ((new != codes) | (new_final != final)))
        records.append(PassRecord(now - start - overhead, cells, new[cells].copy(), new_final[cells].copy()))
        codes, final = new.copy(), new_final
        if on_pass is not None and on_pass(len(records), left):
            pipe._interrupt = True
        overhead += time.perf_counter() - now
        return {}

    kept = pipe.verifier
    pipe.verifier = with_sampling(decoder.verifier, kept)
    try:
        with hidden_progress_bar(pipe):
            start = time.perf_counter()
            output = pipe(
                prompt,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
                callback_on_step_end=note,
                callback_on_step_end_tensor_inputs=("latents", "drafted"),
                **call,
            )
    finally:
        pipe.verifier = kept
    if output.stats.rows_completed < output.codes.shape[1]:
        raise RaceStopped
    rows, columns = output.codes.shape[1:]
    return Recording(title or decoder.name, decoder.lossless, rows, columns, records, output.stats.tokens)


def record_race(
    pipe: SpatialSpeculativePipeline,
    decoders: Sequence[tuple[str, Decoder]],
    prompt: str,
    seed: int = 0,
    max_pictures: int = 32,
    model: str = "",
    machine: str = "",
    repeats: int = 1,
    on_pass: Callable[[str, int, int], bool] | None = None,
    **call: Any,
) -> Race:
    """Record decoders one after the other, and decode pictures of what each had drawn after some of its passes.

    Args:
        decoders: titles and decoders, as `race_decoders` returns them. The first is the reference.
        max_pictures: decoded per decoder, evenly over its passes.
        model, machine: descriptions to keep with the race.
        repeats: recordings per decoder, of which the one with the median time is kept. More than one recording guards
            against a pause of the machine in the middle of it.
        on_pass: is called with the decoder's title, passes made and passes left; returns `True` to stop.
        call: further arguments of the pipeline's call, like `guidance_scale`.

    Raises:
        RaceStopped: if `on_pass` asked to stop.
    """
    for _, decoder in decoders:  # the first passes of a process are slow: none of them is timed
        _warm_up(pipe, decoder, prompt, **call)
    recordings = []
    for title, decoder in decoders:
        told = None if on_pass is None else lambda made, left, title=title: on_pass(title, made, left)
        runs = [record(pipe, decoder, prompt, seed, title, told, **call) for _ in range(repeats)]
        recordings.append(sorted(runs, key=lambda run: run.seconds)[(repeats - 1) // 2])
    for recording in recordings:
        count = len(recording.passes)
        reference = recordings[0]
        same = np.array_equal(recording.after(count)[0], reference.after(len(reference.passes))[0])
        recording.matches_reference = same
        decode_pictures(pipe, recording, max_pictures)
    return Race(prompt, seed, model, machine, tuple(recordings))


def decode_pictures(pipe: SpatialSpeculativePipeline, recording: Recording, max_pictures: int = 32) -> None:
    """Fill `recording.pictures`, evenly over its passes; cells without a code are grey."""
    count = len(recording.passes)
    chosen = sorted({round(k * (count - 1) / max(max_pictures - 1, 1)) for k in range(max_pictures)} | {count - 1})
    for start in range(0, len(chosen), 16):
        part = chosen[start : start + 16]
        codes = torch.from_numpy(np.stack([recording.after(index + 1)[0] for index in part]))
        images = pipe.decode_latents(codes.to(pipe.backbone.device))
        recording.pictures.update(zip(part, images, strict=True))


def _warm_up(pipe: SpatialSpeculativePipeline, decoder: Decoder, prompt: str, **call: Any) -> None:
    try:
        record(pipe, decoder, prompt, on_pass=lambda made, left: made >= 3, **call)
    except RaceStopped:
        pass
