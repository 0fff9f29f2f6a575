"""Convert published checkpoints, once, into folders that `from_pretrained` loads without options.

Only conversion opens pickles, see `load_pickled_tensors`; the output is safetensors.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    GenerationConfig,
    T5EncoderModel,
)

from ssd_pipelines.backbones.llamagen import LlamaGenBackbone, LlamaGenConfig, LlamaGenModel
from ssd_pipelines.backbones.lumina import SIZE_UNIT, LuminaBackbone, size_token
from ssd_pipelines.conversion.files import load_pickled_tensors, load_whole, reading, shape_of, some
from ssd_pipelines.conversion.picture_tokenizers import vq_model_from_llamagen, vq_model_from_vqgan
from ssd_pipelines.loading.weights import check_nothing_is_missing
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.verifiers import SpatialDraftVerifier


Report = Callable[[str], None]

LLAMAGEN_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 3200: 32, 4096: 32}
"""Attention heads by model width, for the released sizes. The width alone is not enough: 3B has wider heads."""


def convert_lumina_mgpt(
    source: str | os.PathLike[str],
    vqgan: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    image_size: int | None = None,
    report: Report = print,
) -> None:
    """Convert a Lumina-mGPT checkpoint and Meta's picture tokenizer to a saved pipeline.

    Args:
        source: folder of Alpha-VLLM/Lumina-mGPT-7B-768 or a sibling: `config.json` and safetensors.
        vqgan: Meta's `vqgan.ckpt` (Alpha-VLLM/Chameleon_7B_mGPT has a copy).
        output: a folder that is empty or doesn't exist.
        tokenizer: folder with the tokenizer's files; by default `source`, but only the -768 repository has them.
        dtype: dtype of the saved backbone; the picture tokenizer stays in float32.
        image_size: side of a square picture in pixels, a multiple of 32; by default the number in the folder's name
            (512, 768 or 1024), else 768.
        report: is called with a message at each stage.

    Raises:
        ValueError: if something is missing or has the wrong format; nothing is written then.
    """
    folder, target = Path(source), Path(output)
    _check_target(target)
    shards = _shards(folder)
    if not (folder / "config.json").is_file() or not shards:
        raise ValueError(
            f"{folder} needs a config.json and *.safetensors of Lumina-mGPT: download the repository there."
        )
    config = _lumina_config(folder)
    if image_size is None:
        stated = re.search(r"-(512|768|1024)(?:\D|$)", folder.resolve().name)
        image_size = int(stated[1]) if stated else 768
    _check_lumina_size(image_size, config, folder)
    config.image_size = image_size
    described = folder if tokenizer is None else Path(tokenizer)
    if not (described / "tokenizer.json").is_file() and not (described / "tokenizer.model").is_file():
        raise ValueError(
            f"{described} has no tokenizer.json: of the siblings only Lumina-mGPT-7B-768 has a tokenizer, so give its "
            "folder as `tokenizer`."
        )
    with reading(described, "as a tokenizer"):
        words = AutoTokenizer.from_pretrained(described, trust_remote_code=False)

    report("reading the picture tokenizer")
    image_tokenizer = vq_model_from_vqgan(load_pickled_tensors(vqgan), str(vqgan))
    codes = image_tokenizer.config.num_vq_embeddings
    report("reading the backbone")
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        with reading(shard, "as safetensors"):
            tensors |= load_file(shard)
    expand_head_norms(tensors, config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads)
    with reading(folder / "config.json", "as Lumina-mGPT's"), torch.device("meta"):
        model = ChameleonForConditionalGeneration(config)
    # The class in transformers has an image encoder, which the checkpoint lacks and decoding doesn't use.
    for name, value in model.state_dict().items():
        if name.startswith("model.vqmodel.") and name not in tensors:
            tensors[name] = torch.zeros(value.shape, dtype=value.dtype if not value.is_floating_point() else dtype)
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    load_whole(model, tensors, str(folder))
    model.generation_config = GenerationConfig.from_model_config(config)
    drawn = len(model.model.vocabulary_mapping.image_tokens)
    if codes != drawn:
        raise ValueError(f"{vqgan} has {codes} codes, the backbone draws {drawn}: they do not belong together.")
    verifier = SpatialDraftVerifier.paper("lumina_mgpt")
    pipe = SpatialSpeculativePipeline(model.eval(), words, verifier=verifier, image_tokenizer=image_tokenizer)
    report(f"writing {target}")
    pipe.save_pretrained(target)


def convert_llamagen(
    checkpoint: str | os.PathLike[str],
    vq: str | os.PathLike[str],
    output: str | os.PathLike[str],
    image_size: int,
    text_encoder: str | os.PathLike[str] | None = None,
    num_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    report: Report = print,
) -> None:
    """Convert a LlamaGen checkpoint and its picture tokenizer to a saved pipeline.

    Args:
        checkpoint: `t2i_XL_stage2_512.pt` or another text-conditional or class-conditional checkpoint.
        vq: `vq_ds16_t2i.pt`, or `vq_ds16_c2i.pt` for class-conditional models.
        output: a folder that is empty or doesn't exist.
        image_size: side of a picture in pixels, a multiple of 16, which the file doesn't contain: 256, 384 or 512 for
            the released checkpoints.
        text_encoder: folder of the T5 encoder (google/flan-t5-xl) with its tokenizer, for text-conditional models.
        num_heads: number of attention heads, which the file doesn't contain either; known for the released sizes,
            required for others.
        dtype: dtype of the saved weights; the picture tokenizer stays in float32.
        report: is called with a message at each stage.

    Raises:
        ValueError: if something is missing or has the wrong format; nothing is written then.
    """
    target = Path(output)
    _check_target(target)
    if type(image_size) is not int or image_size <= 0 or image_size % LlamaGenBackbone.patch_size:
        raise ValueError(
            f"`image_size` is {image_size!r}, but LlamaGen's pictures have sides that are multiples of "
            f"{LlamaGenBackbone.patch_size}: give the checkpoint's size, 256, 384 or 512 for the released ones."
        )
    report("reading the picture tokenizer")
    image_tokenizer = vq_model_from_llamagen(load_pickled_tensors(vq), str(vq))
    report("reading the backbone")
    tensors, source = load_pickled_tensors(checkpoint), str(checkpoint)
    if "tok_embeddings.weight" not in tensors or "layers.0.attention.wqkv.weight" not in tensors:
        raise ValueError(f"{source} has no tok_embeddings and layers.*.attention.wqkv: it is not a LlamaGen.")
    vocabulary, width = shape_of(tensors, "tok_embeddings.weight", 2, source)
    rows, _ = shape_of(tensors, "layers.0.attention.wqkv.weight", 2, source)
    heads, key_value_heads = _llamagen_heads(width, rows, num_heads, source)
    condition: dict[str, Any]
    if "cls_embedding.uncond_embedding" in tensors:
        if text_encoder is None:
            raise ValueError(f"{source} draws from text: give the folder of its T5 encoder as well.")
        length, caption_width = shape_of(tensors, "cls_embedding.uncond_embedding", 2, source)
        condition = {"condition": "text", "prefix_length": length, "caption_width": caption_width}
    elif "cls_embedding.embedding_table.weight" in tensors:
        classes, _ = shape_of(tensors, "cls_embedding.embedding_table.weight", 2, source)
        condition = {"condition": "class", "prefix_length": 1, "num_classes": classes - 1}
    else:
        raise ValueError(
            f"{source} has neither cls_embedding.uncond_embedding nor cls_embedding.embedding_table, so it draws "
            "neither from text nor from classes: download it again."
        )
    config = LlamaGenConfig(
        hidden_size=width,
        num_hidden_layers=1 + max(int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=shape_of(tensors, "layers.0.feed_forward.w1.weight", 2, source)[0],
        vocab_size=vocabulary,
        grid_size=image_size // LlamaGenBackbone.patch_size,
        **condition,
    )
    with torch.device("meta"):
        model = LlamaGenModel(config)
    known = {name: value for name, value in tensors.items() if name != "freqs_cis"}  # a table that is computed
    known = {name: value.to(dtype) for name, value in known.items()}
    load_whole(model, known, source)
    if vocabulary != image_tokenizer.config.num_vq_embeddings:
        raise ValueError(
            f"{vq} has {image_tokenizer.config.num_vq_embeddings} codes, the backbone draws {vocabulary}: they do not "
            "belong together."
        )
    words, encoder = None, None
    if text_encoder is not None and config.condition == "text":
        words, encoder = _t5(Path(text_encoder), config.caption_width, dtype)
    pipe = SpatialSpeculativePipeline(
        model.eval(), words, image_tokenizer=image_tokenizer, text_encoder=encoder, verifier=SpatialDraftVerifier()
    )
    report(f"writing {target}")
    pipe.save_pretrained(target)


def expand_head_norms(tensors: dict[str, torch.Tensor], num_heads: int, num_key_value_heads: int) -> None:
    """Repeat the norms of queries and keys, which are stored once per group of heads, to one row per head, in place.

    Args:
        tensors: tensors of the checkpoint, by name; norms have shape `(groups, head_size)`.
        num_heads, num_key_value_heads: number of query heads and of key heads.

    Raises:
        ValueError: if the number of heads is not a multiple of the number of rows.
    """
    for name, value in tensors.items():
        heads = {"q_norm": num_heads, "k_norm": num_key_value_heads}.get(name.split(".")[-2] if "." in name else "")
        if heads is None:
            continue
        if value.ndim != 2 or not value.shape[0] or heads % value.shape[0]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, which {heads} heads can't share.")
        tensors[name] = value.repeat_interleave(heads // value.shape[0], dim=0)


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty: give a new folder.")


def _lumina_config(folder: Path) -> ChameleonConfig:
    with reading(folder / "config.json", "as settings"):
        settings = dict(json.loads((folder / "config.json").read_text("utf-8")))
    released = "give the folder of Alpha-VLLM/Lumina-mGPT-7B-768 or a sibling"
    model_type = settings.get("model_type")
    if model_type != LuminaBackbone.model_type:
        raise ValueError(
            f"{folder} is not a Lumina-mGPT checkpoint, because its config.json has model type {model_type!r}, not "
            f"{LuminaBackbone.model_type!r}: {released}."
        )
    lacking = LuminaBackbone.lacks(settings)
    if lacking is not None:
        raise ValueError(
            f"{folder} is not a Lumina-mGPT checkpoint, because its config.json lacks {lacking}: {released}."
        )
    with reading(folder / "config.json", "as Lumina-mGPT's"):
        return ChameleonConfig.from_dict(settings)


def _check_lumina_size(image_size: int, config: ChameleonConfig, folder: Path) -> None:
    sides = []
    for side in range(SIZE_UNIT, (len(config.vocabulary_map) + 1) * SIZE_UNIT, SIZE_UNIT):
        codes = side // LuminaBackbone.patch_size
        if size_token(side) in config.vocabulary_map and codes * (codes + 1) < config.max_position_embeddings:
            sides.append(side)
    if type(image_size) is not int or image_size not in sides:
        raise ValueError(
            f"`image_size` is {image_size!r}, but {folder} draws squares whose side is a multiple of {SIZE_UNIT} up to "
            f"{max(sides, default=0)}: give the size it was trained for, 512, 768 or 1024 for the released ones."
        )


def _llamagen_heads(width: int, rows: int, num_heads: int | None, source: str) -> tuple[int, int]:
    """Return the numbers of query and key heads, from the model's width and the rows of the joint projection."""
    heads = LLAMAGEN_HEADS.get(width) if num_heads is None else num_heads
    if heads is None:
        raise ValueError(
            f"{source} has a width of {width}, which no released LlamaGen has: give its number of attention heads as "
            "`num_heads` (`--num-heads`)."
        )
    size = width // heads if heads > 0 else 0
    # Rotary embeddings use pairs of values, half of them for rows and half for columns.
    if size and heads * size == width and size % 4 == 0:
        key_value_heads, rest = divmod(rows - width, 2 * size)
        if not rest and key_value_heads > 0 and heads % key_value_heads == 0:
            return heads, key_value_heads
    raise ValueError(
        f"{heads} heads don't fit a width of {width} and {rows} rows of {source}: give the right number of heads."
    )


def _t5(folder: Path, width: int, dtype: torch.dtype) -> tuple[Any, T5EncoderModel]:
    """Load the tokenizer and the encoder."""
    described = any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model"))
    if not described or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} needs a config.json, *.safetensors and a tokenizer.json of a T5: download google/flan-t5-xl "
            "there."
        )
    with reading(folder, "as a T5 with its tokenizer"):
        words = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        encoder, loading = T5EncoderModel.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    check_nothing_is_missing(loading["missing_keys"], (), str(folder))
    if encoder.config.d_model != width:
        raise ValueError(
            f"{folder} has states of width {encoder.config.d_model}, the model was trained with {width}: it needs "
            "another T5."
        )
    return words, encoder


def _shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; if it has an index, only the files that it names."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    with reading(index, "as an index"):
        shards = [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {some(absent)}, which its {index.name} names: download the rest.")
    return shards
