"""What decoding costs at a real size, without weights to download: `python examples/real_size.py janus-pro-1b`.

A random-weight model of that size draws one picture one token at a time, and one by our default decoder, each as far
as `--seconds` allows. What is not reached is extrapolated along the measured cost of a pass, and labelled so.

Random weights say what a pass costs, not how many there are: their predictions hardly look at the drawing, so how many
drafts they accept means nothing. The last table therefore takes the passes from where they were counted.
"""

import argparse
import resource
import statistics
import time

import torch

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier
from ssd_pipelines.evaluation.latency import measure_width_costs
from ssd_pipelines.testing import SIZES, random_pipeline


# With one thread on a CPU its own time counts, whatever else the machine does.
clock = time.perf_counter
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("size", nargs="?", default="janus-pro-1b", choices=SIZES)
parser.add_argument("--seconds", type=float, default=600, help="for each of the two decoders, at most")
parser.add_argument("--repeats", type=int, default=5, help="of each width on the cost curve")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
arguments = parser.parse_args()
if arguments.device == "cpu" and torch.get_num_threads() == 1:
    clock = time.process_time


def peak_memory() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"  # kilobytes on Linux


class Bounded:
    """Notes when each pass ends and how far the picture is, and ends the call when time is up."""

    def __init__(self) -> None:
        self.ends = [clock()]

    def __call__(self, pipe, step, passes_left, tensors):
        self.ends.append(clock())
        pipe._interrupt = self.ends[-1] - self.ends[0] > arguments.seconds
        return {}

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def draw(verifier):
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
arguments.seconds = 0  # warm up with one pass
draw(AutoregressiveVerifier())
arguments.seconds = draw_seconds

_, steps = draw(AutoregressiveVerifier())
steps = steps[1:]  # the first pass reads the prompt
measured = len(steps) + 1
# A step reads a longer cache each time: a line through the medians of the first and the second half gives the rest.
half = len(steps) // 2
early, late = statistics.median(steps[:half] or steps), statistics.median(steps[half:])
slope = (late - early) / max(1, half)
rest = sum(max(early, late + slope * (step - 1.5 * half)) for step in range(measured, positions))
autoregressive = sum(steps) + rest
print(
    f"one token at a time: {measured} of {positions} passes in {sum(steps):.0f} s, {early:.2f} s a step early and "
    f"{late:.2f} s late; the picture {autoregressive:.0f} s{' (extrapolated)' if measured < positions else ''}"
)
print(f"peak memory: {peak_memory()}", flush=True)

stats, passes = draw(SpatialDraftVerifier(window=2 * pipe.adapter().grid().stride))
whole = stats.rows_completed == 24
print(
    f"our default: {stats.rows_completed} of 24 rows in {stats.nfe} passes and {sum(passes):.0f} s, "
    f"{statistics.median(passes[1:]):.2f} s a pass; drafting "
    f"{stats.seconds.get('drafting', 0.0) / stats.seconds['total']:.0%} of it"
)
if whole:
    print(f"wall ratio, with what random weights accept: {autoregressive / sum(passes):.2f}")
print(f"peak memory: {peak_memory()}", flush=True)

print("\nA pass over n tokens, and drafting as many, in steps of one token (guided, half of the picture cached):")
costs = measure_width_costs(pipe, [1, 5, 24, 48], repeats=arguments.repeats)
for cost in costs:
    print(f"  {cost.tokens:3}: pass {cost.pass_cost:.2f}, drafting {cost.drafting_cost:.2f}")
row, two_rows = costs[2], costs[3]

print(f"\nWall ratio over one token at a time ({positions} passes), extrapolated from these costs:")
for name, count, cost in (
    ("the paper's passes for Janus-Pro-7B, one row a pass", 80, row),
    ("the same passes, two rows a pass", 80, two_rows),
    ("as many passes a row as lossless windows of two rows take on the embedded model, 16.6 for 16", 25, two_rows),
    ("one row a pass and no correction", 24 + 24 // 5, row),
):
    seconds = count * (cost.pass_cost + cost.drafting_cost)
    print(f"  {name}: {count} passes: {positions / seconds:.2f}")
