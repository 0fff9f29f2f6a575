"""Export the trained model to a folder that plain transformers loads and that is also a saved pipeline without heads.

    python examples/scenes_model/export.py --tokenizer run/tokenizer --backbone run/backbone \\
        --output ssd_pipelines/scenes/checkpoint

    JanusForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder),
    JanusProcessor.from_pretrained(folder)
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from common import GRID_SIDE, model_config
from plain_vqvae import plain_vqvae, to_stock
from safetensors.torch import load_file, save_file
from text_tokenizer import SPECIAL, build_tokenizer
from transformers import GenerationConfig, JanusForConditionalGeneration, JanusProcessor
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

from ssd_pipelines import SpatialDraftVerifier


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="output folder of train_image_tokenizer.py")
    parser.add_argument("--backbone", type=Path, required=True, help="output folder of train_backbone.py")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; an existing one is replaced")
    parser.add_argument("--guidance-scale", type=float, default=1.2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    return parser.parse_args()


def trained_model(tokenizer_folder: Path, backbone_folder: Path) -> JanusForConditionalGeneration:
    """Load the averaged backbone weights and the image tokenizer into the stock transformers model.

    Raises:
        ValueError: if the backbone's checkpoint has weights that the model doesn't have.
    """
    text = build_tokenizer()
    special = {key: getattr(text, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = model_config(len(text), image_token_id=text.convert_tokens_to_ids(text.image_token), **special)
    model = JanusForConditionalGeneration(config).eval()
    state = torch.load(backbone_folder / "state.pt", weights_only=True)
    unknown = model.load_state_dict(state["average"], strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"The backbone's checkpoint has weights that the model doesn't have: {unknown}.")
    plain = plain_vqvae(config.vq_config)
    plain.load_state_dict(torch.load(tokenizer_folder / "state.pt", weights_only=True)["model"])
    model.model.vqmodel.load_state_dict(to_stock(plain, config.vq_config).state_dict())
    return model


def shrink(folder: Path) -> None:
    """Store the image tokenizer's convolutions in bfloat16; `from_pretrained` loads them as float32.

    Half of their weights are zeros or negated copies (see plain_vqvae.py), so this costs far less precision than their
    number suggests. The codebook is not rounded, because that would move the borders between codes.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "vqmodel" in name and tensor.dim() == 4:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # readable by all users of an installed package


def main() -> None:
    """Write the export to a new folder and swap it in."""
    args = arguments()
    model, tokenizer = trained_model(args.tokenizer, args.backbone), build_tokenizer()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        generation_kwargs={"boi_token_id": tokenizer.convert_tokens_to_ids(SPECIAL["boi_token"])},
        do_sample=True,
        guidance_scale=args.guidance_scale,
        temperature=args.temperature,
        top_k=0,
        top_p=args.top_p,
    )
    folder = args.output.with_name(args.output.name + ".new")
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    shrink(folder)
    images = JanusImageProcessorPil(
        image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": 64, "width": 64}, min_size=14
    )
    processor = JanusProcessor(images, tokenizer, chat_template=tokenizer.chat_template, num_image_tokens=GRID_SIDE**2)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The verifier stores the recommended sampling settings. `model_index.json` makes the flat transformers folder a
    # saved pipeline: components without their own subfolder are read from the root.
    verifier = SpatialDraftVerifier(temperature=args.temperature, top_p=args.top_p)
    verifier.save_pretrained(folder / "verifier")
    index = {
        "_class_name": "SpatialSpeculativePipeline",
        "_diffusers_version": verifier.config["_diffusers_version"],
        "backbone": ["transformers", "JanusForConditionalGeneration"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "heads": [None, None],
        "verifier": ["ssd_pipelines", "SpatialDraftVerifier"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    # Swap whole folders, so that a reader never sees a mix of old and new files.
    old = args.output.with_name(args.output.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if args.output.exists():
        args.output.rename(old)
    folder.rename(args.output)
    shutil.rmtree(old, ignore_errors=True)
    sizes = {path.name: path.stat().st_size for path in sorted(args.output.iterdir()) if path.is_file()}
    print(json.dumps(sizes, indent=1), f"together {sum(sizes.values()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
