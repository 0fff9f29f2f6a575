"""Measure the cost of decoding at a real size, without a download: `python examples/real_size.py janus-pro-1b`.

A model of that size with random weights decodes one picture one token at a time, and one with the lossless default
decoder and a window of two rows. Each stops after `--seconds`. The rest of the autoregressive picture is extrapolated
from the measured cost of a pass, and the output says so.

Random weights show what a pass costs, not how many passes a picture takes: their predictions hardly depend on the
picture, so their acceptance means nothing. The last table therefore uses pass counts from other sources.
"""

import argparse
import resource
import statistics
import time

import torch

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier
from ssd_pipelines.evaluation.latency import measure_width_costs
from ssd_pipelines.testing import SIZES, random_pipeline


# With one thread on a CPU, measure the CPU time of the process, so that other load on the machine doesn't count.
clock = time.perf_counter
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("size", nargs="?", default="janus-pro-1b", choices=SIZES)
parser.add_argument("--seconds", type=float, default=600, help="maximum for each of the two decoders")
parser.add_argument("--repeats", type=int, default=5, help="repetitions of each width on the cost curve")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
arguments = parser.parse_args()
if arguments.device == "cpu" and torch.get_num_threads() == 1:
    clock = time.process_time


def peak_memory() -> str:
    """Return the peak memory of the GPU, or of the process without one, in GB."""
    if torch.cuda.is_available():
        return f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"  # kilobytes on Linux


class Bounded:
    """Callback that records when each pass ends and interrupts the pipeline after `--seconds`."""

    def __init__(self) -> None:
        self.ends = [clock()]

    def __call__(self, pipe, step, passes_left, tensors):
        self.ends.append(clock())
        pipe._interrupt = self.ends[-1] - self.ends[0] > arguments.seconds
        return {}

    def seconds(self) -> list[float]:
        """Return the duration of each pass, in seconds."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def draw(verifier):
    """Decode one picture and return its statistics and the seconds of each pass."""
    pipe.verifier = verifier
    bounded = Bounded()
    generator = torch.Generator().manual_seed(0)
    output = pipe("a photo of a red circle", generator=generator, output_type="latent", callback_on_step_end=bounded)
    return output.stats, bounded.seconds()


pipe = random_pipeline(arguments.size, torch.bfloat16, arguments.device)
parameters = sum(p.numel() for p in pipe.adapter().decoder.parameters())
heads = sum(p.numel() for p in pipe.heads.parameters())
print(f"{arguments.size}: {parameters / 1e9:.2f} billion parameters, heads {heads / 1e9:.2f}; bfloat16")
print(f"{arguments.device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
print(f"peak memory, loaded: {peak_memory()}", flush=True)

positions = pipe.adapter().grid().length
draw_seconds = arguments.seconds
arguments.seconds = 0  # one pass to warm up
draw(AutoregressiveVerifier())
arguments.seconds = draw_seconds

_, steps = draw(AutoregressiveVerifier())
steps = steps[1:]  # the first pass reads the prompt
measured = len(steps) + 1
# Steps get slower as the KV cache grows. Extrapolate along a line through the medians of the first and second half.
half = len(steps) // 2
early, late = statistics.median(steps[:half] or steps), statistics.median(steps[half:])
slope = (late - early) / max(1, half)
rest = sum(max(early, late + slope * (step - 1.5 * half)) for step in range(measured, positions))
autoregressive = sum(steps) + rest
print(
    f"one token at a time: {measured} of {positions} passes in {sum(steps):.0f} s, {early:.2f} s per step early and "
    f"{late:.2f} s late; whole picture {autoregressive:.0f} s{' (extrapolated)' if measured < positions else ''}"
)
print(f"peak memory: {peak_memory()}", flush=True)

stats, passes = draw(SpatialDraftVerifier(window=2 * pipe.adapter().grid().stride))
whole = stats.rows_completed == 24
print(
    f"default, window of two rows: {stats.rows_completed} of 24 rows in {stats.nfe} passes and {sum(passes):.0f} s, "
    f"{statistics.median(passes[1:]):.2f} s per pass; drafting "
    f"{stats.seconds.get('drafting', 0.0) / stats.seconds['total']:.0%} of it"
)
if whole:
    print(f"wall ratio, with the acceptance of random weights: {autoregressive / sum(passes):.2f}")
print(f"peak memory: {peak_memory()}", flush=True)

print("\nCost of a pass over n tokens and of drafting n, in single-token steps (guided, half of the picture cached):")
costs = measure_width_costs(pipe, [1, 5, 24, 48], repeats=arguments.repeats)
for cost in costs:
    print(f"  {cost.tokens:3}: pass {cost.pass_cost:.2f}, drafting {cost.drafting_cost:.2f}")
row, two_rows = costs[2], costs[3]

print(f"\nWall ratio to one token at a time ({positions} passes), extrapolated from these costs:")
for name, count, cost in (
    ("the paper's passes for Janus-Pro-7B, one row per pass", 80, row),
    ("the same passes, two rows per pass", 80, two_rows),
    ("as many passes per row as lossless windows of two rows take on the embedded model, 16.6 for 16", 25, two_rows),
    ("one row per pass and no verification", 24 + 24 // 5, row),
):
    seconds = count * (cost.pass_cost + cost.drafting_cost)
    print(f"  {name}: {count} passes: {positions / seconds:.2f}")
