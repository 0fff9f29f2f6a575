"""Train the image tokenizer: transformers' `JanusVQVAE`, 64x64 pixels to 16x16 codes and back.

    torchrun --standalone --nproc-per-node 2 examples/scenes_model/train_image_tokenizer.py --output run/tokenizer

The codes are fixed in `local_codes.py`. The encoder learns to predict them and the decoder learns to reconstruct pixels
from them, separately. Codebook rows have unit length, because the stock class normalises them when it decodes. The
nearest row, which the stock `encode` chooses, is then the row with the largest dot product, which is trained here.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    PATCH_SIZE,
    Clock,
    average_,
    model_config,
    save_atomically,
    seeded,
    start_processes,
    to_images,
    to_pixels,
)
from local_codes import DOTS, code_vectors, encode
from plain_vqvae import plain_vqvae, to_stock
from transformers import JanusVQVAE

from ssd_pipelines.scenes import SceneOptions, TrainingScene, check_scene, render_array, sample_scene


WHOLE_FROM = 0.75
WINDOW = 32


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for state.pt and the finished tokenizer")
    parser.add_argument("--minutes", type=float, default=12.0, help="length of the run, restarts included")
    parser.add_argument("--batch", type=int, default=4, help="whole pictures per process and step")
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--decoder-only", action="store_true", help="train the decoder only, keep the encoder frozen")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def picture_batch(seed: int, rank: int, step: int, size: int) -> list[TrainingScene]:
    """Return the `size` scenes that the process `rank` trains on at `step`."""
    random = seeded(seed, rank, step)
    # More patterns, pairs and small objects than the backbone sees, because they are hard to reconstruct.
    options = SceneOptions(
        families=(1, 1, 2, 1, 1, 1), sizes=(16, 16, 20, 24, 28), patterns=(3, 2, 1, 2, 2, 1), dense=0.0
    )
    return [sample_scene(random, options) for _ in range(size)]


def cut_window(item: TrainingScene, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a window around an object, aligned to tokens: pixels `(32, 32, 3)` and codes `(8, 8)`."""
    chosen = item.scene.objects[step % len(item.scene.objects)]
    column, row = (min(max(int(v - WINDOW / 2 - 2 + step % 9) // PATCH_SIZE, 0), 8) for v in (chosen.x, chosen.y))
    y, x, n = row * PATCH_SIZE, column * PATCH_SIZE, WINDOW // PATCH_SIZE
    pixels, codes = render_array(item.scene), encode(item.scene)
    return pixels[y : y + WINDOW, x : x + WINDOW], codes[row : row + n, column : column + n]


def reconstruction_loss(output: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Return the sum of L1, L2 and gradient losses; objects weigh more than the background, which is most of a picture.

    Args:
        output: reconstruction, `float32 (batch, 3, height, width)`.
        pixels: the picture, same shape, in [-1, 1].
    """
    chroma = pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True)
    weight = 1 + 3 * (F.max_pool2d(chroma, 3, 1, 1) > 0.5)
    error = output - pixels
    loss = (weight * (error.abs() + 2 * error.square())).mean()
    for axis in (2, 3):
        loss = loss + (error.diff(dim=axis).abs() * weight.narrow(axis, 1, weight.shape[axis] - 1)).mean()
    return loss


def code_loss(encoded: torch.Tensor, codebook: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the codes; patches with an outline or a dot weigh more than flat ones.

    Args:
        encoded: output of the encoder, `float32 (batch, 8, rows, columns)`.
        codebook: `float32 (512, 8)`.
        codes: targets, `int64 (batch, rows, columns)`.
    """
    logits = (encoded.permute(0, 2, 3, 1) @ codebook.T).flatten(0, 2)
    losses = F.cross_entropy(logits, codes.flatten(), reduction="none")
    weight = 0.2 + (codes.flatten() >= DOTS)
    return (losses * weight).sum() / weight.sum()


@torch.no_grad()
def evaluate(model: JanusVQVAE, seed: int, num: int = 240) -> str:
    """Measure the model on `num` scenes and return the figures as text.

    They are the PSNR and the share accepted by the checker for pictures decoded from the true codes, the share accepted
    for pictures decoded from the encoder's codes, and the share of codes that the encoder gets right.
    """
    scenes = [sample_scene(seeded(seed, "evaluate", k), SceneOptions()) for k in range(num)]
    squared, agree, right, right_own = 0.0, 0.0, 0, 0
    for start in range(0, num, 24):
        part = scenes[start : start + 24]
        pixels = to_pixels(render_array(item.scene) for item in part)
        codes = torch.from_numpy(np.stack([encode(item.scene) for item in part])).flatten(1)
        own = model.encode(pixels, return_dict=True).image_tokens.view(len(part), -1)
        agree += float((own == codes).float().mean(1).sum())
        output, output_own = model.decode(codes), model.decode(own)
        squared += float((output.clamp(-1, 1) - pixels).square().mean((1, 2, 3)).sum()) / 4
        right += sum(check_scene(image, item.task).correct for item, image in zip(part, to_images(output), strict=True))
        right_own += sum(
            check_scene(image, item.task).correct for item, image in zip(part, to_images(output_own), strict=True)
        )
    return (
        f"psnr={-10 * math.log10(squared / num):.2f} right={right / num:.3f} "
        f"right_after_encoding={right_own / num:.3f} codes_agree={agree / num:.4f}"
    )


def main() -> None:
    """Train until the budget is used, and save the stock model."""
    args = arguments()
    rank, processes = start_processes()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    state_path = args.output / "state.pt"
    stock_config = model_config().vq_config
    model = plain_vqvae(stock_config)
    model.quantize.embedding.weight.data.copy_(torch.from_numpy(code_vectors()))
    codebook = model.quantize.embedding.weight.requires_grad_(False)
    if args.decoder_only:
        model.encoder.requires_grad_(False)
        model.quant_conv.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    step, clock = 0, Clock(args.minutes)
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        if len(state["optimizer"]["state"]) == len(parameters):
            optimizer.load_state_dict(state["optimizer"])
        step, clock = state["step"], Clock(args.minutes, state["elapsed"])

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        save_atomically({**state, "elapsed": clock.elapsed}, state_path)

    saved = time.time()
    while (progress := clock.shared_progress()) < 1:
        optimizer.param_groups[0]["lr"] = args.learning_rate * min((step + 1) / 50, 1, (1 - progress) / 0.5 + 1e-3)
        # Most of a picture is background, so windows around an object teach the same at a quarter of the cost. The last
        # part of training uses whole pictures, because attention and borders differ in them.
        whole = progress > WHOLE_FROM
        scenes = picture_batch(args.seed, rank, step, args.batch * (1 if whole else 2))
        pairs = [(render_array(s.scene), encode(s.scene)) if whole else cut_window(s, step) for s in scenes]
        pixels = to_pixels(pair[0] for pair in pairs).contiguous(memory_format=torch.channels_last)
        codes = torch.from_numpy(np.stack([pair[1] for pair in pairs]))
        output = model.decoder(model.post_quant_conv(F.embedding(codes, codebook).permute(0, 3, 1, 2)))
        painting = reconstruction_loss(output, pixels)
        writing = torch.zeros(())
        if not args.decoder_only:
            writing = code_loss(model.quant_conv(model.encoder(pixels)), codebook, codes)
        optimizer.zero_grad()
        (painting + 0.3 * writing).backward()
        average_([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if rank == 0 and step % 50 == 0:
            mse = float((output.detach() - pixels).square().mean()) / 4
            print(
                f"step {step} {clock.elapsed:.0f}s painting={painting.item():.4f} psnr={-10 * math.log10(mse):.2f} "
                f"writing={writing.item():.4f}",
                flush=True,
            )
        if rank == 0 and step % 400 == 0:
            print("  " + evaluate(model, args.seed, 96), flush=True)
        if rank == 0 and time.time() - saved > 90:
            save()
            saved = time.time()
    if rank == 0:
        save()
        stock = to_stock(model, stock_config)
        stock.save_pretrained(args.output)
        print("finished: " + evaluate(stock, args.seed), flush=True)


if __name__ == "__main__":
    main()
