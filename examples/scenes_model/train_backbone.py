"""Train the backbone: a small Llama in `JanusForConditionalGeneration` that generates image codes from a prompt.

    torchrun --standalone --nproc-per-node 2 examples/scenes_model/train_backbone.py --output run/backbone

A curriculum (`curriculum.py`) starts with one centred object and advances only while the model uses the text. Three
figures show progress: the cross-entropy in nats per token; the *text gain* by family, which is what the prompt saves in
nats per picture (256 x the difference of the cross-entropies without and with it) on held-out pictures; and the
checker's score of generated pictures by family.
"""

import argparse
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    GRID_SIDE,
    NUM_CODES,
    Clock,
    average_,
    model_config,
    save_atomically,
    seeded,
    start_processes,
)
from curriculum import FULL_LEVEL, options_at
from evaluate import validation_tasks
from local_codes import OBJECTS, code_vectors, encode, preview
from muon import Muon
from PIL import Image
from safetensors.torch import load_file
from text_tokenizer import PromptEncoder, build_tokenizer
from torch import nn
from transformers import JanusForConditionalGeneration

from ssd_pipelines import AutoregressiveVerifier, SpatialSpeculativePipeline
from ssd_pipelines.scenes import FAMILIES, SceneOptions, SceneTask, check_scene, sample_scene


NUM_TOKENS = GRID_SIDE**2
PROMPT_LENGTH = 34
"""Number of tokens of the longest prompt."""
START_WEIGHT, OCCUPANCY_WEIGHT, LOOKAHEAD_WEIGHT = 0.3, 4.0, 0.05
"""Weights of `start_loss`, `occupancy_loss` and `lookahead_loss`; the mean cross-entropy has weight 1."""
CORRUPTED = 0.03
"""Share of input codes that are replaced, in the half of the pictures that are corrupted; see `corrupted`."""
SHORT_ROWS, SHORT_SHARE = 7, 0.15
"""`SHORT_SHARE` of the steps train on the first `SHORT_ROWS` rows only, with twice as many pictures: nearly all objects
start there, and their starts are what the text decides."""
DROPPED = 0.1
"""Share of training pictures without a prompt, for classifier-free guidance."""
AVERAGE_DECAY = 0.99
"""Decay of the averaged weights per step."""
Sample = tuple[torch.Tensor, str, SceneTask]
"""Codes `int64 (256,)`, prompt, task."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for state.pt")
    parser.add_argument("--continue-from", type=Path, help="exported checkpoint to start from, instead of new weights")
    parser.add_argument("--minutes", type=float, default=75.0, help="length of the run, restarts included")
    parser.add_argument("--batch", type=int, default=8, help="pictures per process and step")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.002)
    parser.add_argument("--decay-share", type=float, default=0.4, help="last part of the run: rates fall to 0")
    parser.add_argument("--steps-per-level", type=int, default=120)
    parser.add_argument("--report-steps", type=int, default=500)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_model() -> JanusForConditionalGeneration:
    """Return the stock model, with `code_vectors` as initial code embeddings and weights scaled for its width."""
    text = build_tokenizer()
    special = {key: getattr(text, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = model_config(len(text), image_token_id=text.convert_tokens_to_ids(text.image_token), **special)
    config._attn_implementation = "sdpa"
    model = JanusForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "language_model.layers" in name:
            closed = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.0 if closed else parameter.shape[1] ** -0.5)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    # The rows have unit length and 8 entries: scale them so that the aligner's first layer gets inputs near 1.
    model.model.generation_embeddings.weight.data.copy_(torch.from_numpy(code_vectors()) * 8**0.5)
    aligner, head = model.model.generation_aligner, model.model.generation_head
    for linear in (aligner.fc1, *aligner.hidden_layers, head.proj_out):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(linear.bias)
    nn.init.zeros_(head.vision_head.weight)
    nn.init.zeros_(head.vision_head.bias)
    for unused in (model.model.vision_model, model.model.aligner, model.model.vqmodel):
        unused.requires_grad_(False)
    return model


def corrupted(codes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replace short runs of codes `int64 (batch, length)` by those of another picture or by shifted ones.

    Parallel decoding can leave such codes. A model that was trained on correct pictures only continues a stray piece of
    an object that a wrong draft token left. Large models recover because they were trained on enough odd pictures; a
    small one needs these examples. The targets stay the codes of the correct picture.
    """
    batch, length = codes.shape
    begins = torch.rand(batch, length, generator=generator) < CORRUPTED / 2
    # Half of the pictures are not changed; runs in the others are one to three codes long, 2 on average.
    begins &= torch.rand(batch, 1, generator=generator) < 0.5
    lengths = torch.randint(1, 4, (batch, length), generator=generator)
    replaced = begins.clone()
    for further in range(1, 3):
        replaced[:, further:] |= (begins & (lengths > further))[:, :-further]
    other = torch.where(torch.rand(batch, 1, generator=generator) < 0.6, codes.roll(1, 0), codes.roll(1, 1))
    return torch.where(replaced, other, codes)


def code_states(
    model: JanusForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Return the states that predict each code from all codes before it, `(batch, 256, hidden_size)`.

    The state at <begin_of_image> predicts code 0, the state at code i predicts code i + 1.
    """
    embeds = torch.cat(
        [model.get_input_embeddings()(ids), model.prepare_embeddings_for_image_generation(codes[:, :-1])], dim=1
    )
    attended = torch.cat([mask, torch.ones_like(codes[:, :-1])], 1)
    length = attended.shape[1]
    visible = attended[:, None, None, :].bool() & torch.ones(length, length, dtype=torch.bool).tril()
    # Let a padding position attend to itself, or its softmax would be undefined. Its output is not used.
    visible = visible | torch.eye(length, dtype=torch.bool)
    bias = torch.where(visible, 0.0, -1e9)
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    return model.model.language_model(
        inputs_embeds=embeds, attention_mask=bias, position_ids=positions, use_cache=False
    ).last_hidden_state[:, ids.shape[1] - 1 :]


def code_logits(
    model: JanusForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Return the logits of each code given all codes before it, `(batch, 256, 512)`."""
    return model.model.generation_head(code_states(model, ids, mask, codes))


def lookahead_loss(lookahead: nn.Linear, states: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the code one row below, predicted from the state that predicts a code.

    Multi-token prediction (Gloeckle et al., arXiv 2404.19737), down the column instead of along the row: the model
    learns to plan ahead, and its states contain what draft heads read. The linear layer is dropped after training.
    """
    return F.cross_entropy(lookahead(states[:, :-GRID_SIDE]).flatten(0, 1), codes[:, GRID_SIDE:].flatten())


def token_losses(logits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each code, `(batch, 256)`, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").view_as(codes)


def start_loss(logits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the first patch of each object *among object codes*.

    These one to four tokens of 256 decide nearly all that a prompt says about a picture, so they get a higher weight.
    The weight doesn't bias the probabilities of which object starts, given that one starts. A weight on the whole
    cross-entropy would make objects start too often.
    """
    objects = F.pad((codes >= OBJECTS).unflatten(1, (-1, GRID_SIDE)), (1, 1, 1, 0))
    above = objects[:, :-1, :-2] | objects[:, :-1, 1:-1] | objects[:, :-1, 2:]
    starts = (objects[:, 1:, 1:-1] & ~objects[:, 1:, :-2] & ~above).flatten(1)
    return F.cross_entropy(logits[starts][:, OBJECTS:], codes[starts] - OBJECTS)


def training_samples(random: Random, options: SceneOptions, number: int) -> list[Sample]:
    """Sample new scenes. Their codes are computed from the scene at no cost, so no picture is ever used twice."""
    scenes = [sample_scene(random, options) for _ in range(number)]
    return [(torch.from_numpy(encode(item.scene)).flatten(), item.prompt, item.task) for item in scenes]


def occupancy_loss(logits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of "object or background" for all tokens after the first token of the first object.

    Each of these tokens decides a little whether the picture has one object or more. The loss ignores what else is
    uncertain about them (the pattern), and its mask depends only on earlier tokens, so the probabilities stay unbiased.
    """
    occupied = codes >= OBJECTS
    after = (occupied.cumsum(1) - occupied.long()) > 0
    either = torch.stack([logits[..., :OBJECTS].logsumexp(-1), logits[..., OBJECTS:].logsumexp(-1)], -1)
    losses = F.cross_entropy(either.flatten(0, 1), occupied.long().flatten(), reduction="none").view_as(codes)
    return (losses * after).mean()


@torch.no_grad()
def text_gain(
    model: JanusForConditionalGeneration, encoder: PromptEncoder, samples: list[Sample]
) -> tuple[float, dict[str, float]]:
    """Return the cross-entropy with prompt, in nats per token, and the text gain by family, in nats per picture."""
    gains: dict[str, list[float]] = {}
    total = 0.0
    for start in range(0, len(samples), 16):
        part = samples[start : start + 16]
        codes, prompts = torch.stack([item[0] for item in part]), [item[1] for item in part]
        given = token_losses(code_logits(model, *encoder(prompts), codes), codes).sum(1)
        missing = token_losses(code_logits(model, *encoder(prompts, [True] * len(part)), codes), codes).sum(1)
        total += float(given.sum())
        for item, gain in zip(part, (missing - given).tolist(), strict=True):
            gains.setdefault(item[2].family, []).append(gain)
    return total / len(samples) / NUM_TOKENS, {family: sum(values) / len(values) for family, values in gains.items()}


def lagging_first(scores: dict[str, float]) -> dict[str, float]:
    """Return family weights: families with a score of 0 are sampled seven times as often as solved ones."""
    return {family: 0.3 + 1.8 * (1 - score) for family, score in scores.items()}


def gathered(value: Any, processes: int) -> list[Any]:
    """Return the values of all processes."""
    if processes == 1:
        return [value]
    values: list[Any] = [None] * processes
    dist.all_gather_object(values, value)
    return values


class Average:
    """Exponential moving average of the trained weights, with less decay in the first steps."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move the average towards the model's weights."""
        rate = max(1 - AVERAGE_DECAY, 1 / (step / 5 + 1))
        named = dict(model.named_parameters())
        names = list(self.weights)
        torch._foreach_lerp_([self.weights[name] for name in names], [named[name].detach() for name in names], rate)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Swap the model's weights with the averaged ones; a second call swaps them back."""
        for name, parameter in model.named_parameters():
            if name in self.weights:
                kept = parameter.detach().clone()
                parameter.copy_(self.weights[name])
                self.weights[name] = kept


def main() -> None:
    """Train until the budget is used, with reports and checkpoints."""
    args = arguments()
    rank, processes = start_processes()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    state_path = args.output / "state.pt"
    model = build_model()
    encoder = PromptEncoder(build_tokenizer(), PROMPT_LENGTH)
    pipe = SpatialSpeculativePipeline(model, build_tokenizer(), verifier=AutoregressiveVerifier())
    pipe.set_progress_bar_config(disable=True)
    matrices = [p for name, p in model.named_parameters() if "language_model.layers" in name and p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    lookahead = nn.Linear(model.config.text_config.hidden_size, NUM_CODES)
    optimizers = [
        Muon(matrices, lr=args.muon_rate, weight_decay=0.1),
        torch.optim.AdamW([*others, *lookahead.parameters()], lr=args.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    if args.continue_from is not None:
        # The exported weights are averages already, and were trained on all scenes, so skip the curriculum.
        model.load_state_dict(load_file(args.continue_from / "model.safetensors"), strict=False)
    average = Average(model)
    step, level, hold, pictures = 0, 0.0 if args.continue_from is None else FULL_LEVEL, False, 0
    weights: dict[str, float] = {}
    clock = Clock(args.minutes)
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"], strict=False)
        lookahead.load_state_dict(state["lookahead"])
        average.weights = state["average"]
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, level, hold, weights, pictures = (state[key] for key in ("step", "level", "hold", "weights", "pictures"))
        clock = Clock(args.minutes, state["elapsed"])
    if not args.no_compile:
        # Compile one layer and use it for all: this takes minutes less than compiling the whole model.
        for layer in model.model.language_model.layers:
            layer.compile(dynamic=False)

    def save() -> None:
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        save_atomically(
            {
                "model": trained,
                "lookahead": lookahead.state_dict(),
                "average": average.weights,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "level": level,
                "hold": hold,
                "weights": weights,
                "pictures": pictures,
                "elapsed": clock.elapsed,
            },
            state_path,
        )

    def held_out_samples(number: int, at_level: float) -> list[Sample]:
        return training_samples(seeded(args.seed, "gain", rank), options_at(at_level), number)

    full_samples = held_out_samples(120, FULL_LEVEL)

    def gain_report(samples: list[Sample], what: str) -> dict[str, float]:
        average.swap(model)
        with torch.compiler.set_stance("force_eager"):  # not worth compiling for other shapes than in training
            entropy, gains = text_gain(model, encoder, samples)
        average.swap(model)
        reports = gathered((entropy, gains), processes)
        mean = {
            family: sum(r[1].get(family, 0.0) for r in reports) / max(sum(family in r[1] for r in reports), 1)
            for family in FAMILIES
            if any(family in r[1] for r in reports)
        }
        if rank == 0:
            by_family = " ".join(f"{family}={value:.1f}" for family, value in mean.items())
            entropy = sum(report[0] for report in reports) / len(reports)
            print(f"  {what}: nats/token={entropy:.4f} text gain: {by_family}", flush=True)
        return mean

    def score_report(number: int, guidance: float) -> dict[str, float]:
        tasks = validation_tasks(number, args.seed)[rank::processes]
        generator = torch.Generator().manual_seed(args.seed * 1000 + rank)
        average.swap(model)
        with torch.compiler.set_stance("force_eager"):
            prompts = [task.prompt for task in tasks]
            model.eval()
            codes = pipe(prompts, generator=generator, guidance_scale=guidance, output_type="latent").codes
            model.train()
        average.swap(model)
        images = [preview(picture.numpy()) for picture in codes]
        verdicts = [(task.family, check_scene(image, task)) for task, image in zip(tasks, images, strict=True)]
        lists = gathered([(family, verdict.correct) for family, verdict in verdicts], processes)
        flat = [pair for part in lists for pair in part]
        scores = {f: sum(right for g, right in flat if g == f) / max(sum(g == f for g, _ in flat), 1) for f in FAMILIES}
        if rank == 0:
            tiles = [image.repeat(2, 0).repeat(2, 1) for image in images[:30]]
            rows = [np.concatenate(tiles[k : k + 6], 1) for k in range(0, len(tiles) // 6 * 6, 6)]
            Image.fromarray(np.concatenate(rows)).save(args.output / f"samples_{step:06d}.png")
            by_family = " ".join(f"{family}={value:.2f}" for family, value in scores.items())
            mean = sum(scores.values()) / len(scores)
            print(f"  score of {number} at guidance {guidance}: {mean:.3f} ({by_family})", flush=True)
        return scores

    if step == 0 and level >= FULL_LEVEL:
        weights = lagging_first(score_report(60, 1.2))
    started, recent, printed = time.time(), [], step
    saved_at = time.time()
    while (progress := clock.shared_progress()) < 1:
        factor = min((step + 1) / 100, 1) * min(1, (1 - progress) / args.decay_share + 1e-4)
        optimizers[0].param_groups[0]["lr"] = args.muon_rate * factor
        optimizers[1].param_groups[0]["lr"] = args.adam_rate * factor
        random = seeded(args.seed, "train", rank, step)
        # The same choice on every process, so that none has to wait for the others.
        short = level >= FULL_LEVEL and seeded(args.seed, "short", step).random() < SHORT_SHARE
        samples = training_samples(random, options_at(level, weights), args.batch * (1 + short))
        dropped = [random.random() < DROPPED for _ in samples]
        ids, mask = encoder([item[1] for item in samples], dropped)
        codes = torch.stack([item[0] for item in samples])
        if short:
            codes = codes[:, : SHORT_ROWS * GRID_SIDE]
        generator = torch.Generator().manual_seed(random.getrandbits(40))
        states = code_states(model, ids, mask, corrupted(codes, generator))
        logits = model.model.generation_head(states)
        loss, starting = token_losses(logits, codes).mean(), start_loss(logits, codes)
        ahead = lookahead_loss(lookahead, states, codes)
        weighted = START_WEIGHT * starting + OCCUPANCY_WEIGHT * occupancy_loss(logits, codes)
        (loss + weighted + LOOKAHEAD_WEIGHT * ahead).backward()
        average_([p.grad for p in [*matrices, *others, *lookahead.parameters()] if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        pictures += len(samples) * processes
        average.update(model, step)
        recent.append((loss.item(), starting.item(), ahead.item()))
        if not hold:
            level = min(level + 1 / args.steps_per_level, FULL_LEVEL)
        if rank == 0 and step % 50 == 0:
            rate = (step - printed) / (time.time() - started)
            mean, starts, ahead_mean = (sum(values) / len(values) for values in zip(*recent[-50:], strict=True))
            print(
                f"step {step} {clock.elapsed / 60:.1f}min level={level:.2f} loss={mean:.4f} starts={starts:.3f} "
                f"row below={ahead_mean:.3f} "
                f"pictures={pictures} steps per second={rate:.2f} rate={factor:.3f}",
                flush=True,
            )
        if step % 50 == 0:
            started, recent, printed = time.time(), recent[-50:], step
        if level < FULL_LEVEL and step % 100 == 0:
            # In the first levels, wait until the model uses the text: more variety would prevent that.
            gains = gain_report(held_out_samples(24, level), "this level")
            hold = level < 3 and min(gains.get("single_object", 9.0), gains.get("colors", 9.0)) < 1.5
        if step % args.report_steps == 0:
            gain_report(full_samples, "all scenes")
            scores = score_report(60, 1.2)
            if level >= FULL_LEVEL:
                weights = lagging_first(scores)
            started, printed = time.time(), step
        if rank == 0 and time.time() - saved_at > 180:
            save()
            saved_at = time.time()
    gain_report(full_samples, "all scenes")
    score_report(120, 1.2)
    if rank == 0:
        save()
        print("finished", flush=True)
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
