"""Converting published checkpoints, once, into folders that `from_pretrained` loads without options.

Pickles are opened here alone, by `torch.load(weights_only=True)`, which runs none of their code; what is written is
safetensors.
"""

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import VQModel
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    GenerationConfig,
    T5EncoderModel,
)

from ssd_pipelines.backbones.llamagen import LlamaGenBackbone, LlamaGenConfig, LlamaGenModel
from ssd_pipelines.backbones.lumina import LuminaBackbone
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.verifiers import SpatialDraftVerifier


Report = Callable[[str], None]


def convert_lumina_mgpt(
    source: str | os.PathLike[str],
    vqgan: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    image_size: int | None = None,
    report: Report = print,
) -> None:
    """Make a saved pipeline of a Lumina-mGPT checkpoint and Meta's picture tokenizer.

    Args:
        source: folder of Alpha-VLLM/Lumina-mGPT-7B-768 or a sibling: `config.json` and safetensors.
        vqgan: Meta's `vqgan.ckpt` (Alpha-VLLM/Chameleon_7B_mGPT has a copy).
        output: a folder that is empty or doesn't exist.
        tokenizer: folder with the tokenizer's files; by default `source`, but only the -768 repository has them.
        dtype: of the backbone's weights as written; the picture tokenizer stays in float32.
        image_size: side of a square picture in pixels; by default what the folder's name ends with, else 768.

    Raises:
        ValueError: if something is missing or doesn't look like what it should be; nothing is written then.
    """
    folder, target = Path(source), Path(output)
    _check_target(target)
    shards = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not shards:
        raise ValueError(
            f"{folder} needs a config.json and *.safetensors of Lumina-mGPT: download the repository there."
        )
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    if not LuminaBackbone.serves(settings):
        raise ValueError(f"{folder} is no Lumina-mGPT: its vocabulary_map lacks the size and new-line tokens.")
    described = folder if tokenizer is None else Path(tokenizer)
    if not (described / "tokenizer.json").is_file() and not (described / "tokenizer.model").is_file():
        raise ValueError(
            f"{described} has no tokenizer.json: of the siblings only Lumina-mGPT-7B-768 has a tokenizer, so give its "
            "folder as `tokenizer`."
        )
    words = AutoTokenizer.from_pretrained(described, trust_remote_code=False)

    report("reading the picture tokenizer")
    image_tokenizer = vq_model_from_vqgan(load_pickled_tensors(vqgan))
    codes = image_tokenizer.config.num_vq_embeddings
    report("reading the backbone")
    config = ChameleonConfig.from_dict(settings)
    if image_size is None:
        stated = re.search(r"-(512|768|1024)(?:\D|$)", folder.name)
        image_size = int(stated[1]) if stated else 768
    config.image_size = image_size
    tensors = {name: value for shard in shards for name, value in load_file(shard).items()}
    expand_head_norms(tensors, config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads)
    with torch.device("meta"):
        model = ChameleonForConditionalGeneration(config)
    # The library's class wants an encoder of pictures, which the checkpoint doesn't have and decoding doesn't use.
    for name, value in model.state_dict().items():
        if name.startswith("model.vqmodel.") and name not in tensors:
            tensors[name] = torch.zeros(value.shape, dtype=value.dtype if not value.is_floating_point() else dtype)
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(
            f"{folder} doesn't hold a whole Lumina-mGPT: missing {missing[:3] or 'nothing'}, not understood "
            f"{unexpected[:3] or 'nothing'}."
        )
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
    """Make a saved pipeline of a LlamaGen checkpoint and its picture tokenizer.

    Args:
        checkpoint: `t2i_XL_stage2_512.pt` or another, from text or class-conditional.
        vq: `vq_ds16_t2i.pt`, or `vq_ds16_c2i.pt` for class-conditional models.
        output: a folder that is empty or doesn't exist.
        image_size: side of a picture in pixels, which the file doesn't say: 256, 384 or 512.
        text_encoder: folder of the T5 encoder (google/flan-t5-xl) with its tokenizer; for models from text.
        num_heads: of attention, which the file doesn't say either; by default one for 64 of the width, as in all
            released sizes but 3B (32).
        dtype: of the weights as written; the picture tokenizer stays in float32.

    Raises:
        ValueError: if something is missing or doesn't look like what it should be; nothing is written then.
    """
    target = Path(output)
    _check_target(target)
    report("reading the picture tokenizer")
    image_tokenizer = vq_model_from_llamagen(load_pickled_tensors(vq))
    report("reading the backbone")
    tensors = load_pickled_tensors(checkpoint)
    if "tok_embeddings.weight" not in tensors or "layers.0.attention.wqkv.weight" not in tensors:
        raise ValueError(f"{checkpoint} has no tok_embeddings and layers.*.attention.wqkv: it is no LlamaGen.")
    vocabulary, width = tensors["tok_embeddings.weight"].shape
    from_text = "cls_embedding.uncond_embedding" in tensors
    if from_text and text_encoder is None:
        raise ValueError(f"{checkpoint} draws from text: give the folder of its T5 encoder as well.")
    heads = num_heads or max(1, width // 64)
    rows = tensors["layers.0.attention.wqkv.weight"].shape[0]
    key_value_heads, rest = divmod((rows - width) // 2, width // heads)
    if width % heads or rest or not 0 < key_value_heads <= heads:
        raise ValueError(f"{heads} heads don't fit a width of {width} and {rows} rows: give the right number of heads.")
    condition: dict[str, Any] = {"condition": "class", "prefix_length": 1}
    if from_text:
        length, caption_width = tensors["cls_embedding.uncond_embedding"].shape
        condition = {"condition": "text", "prefix_length": length, "caption_width": caption_width}
    else:
        condition["num_classes"] = tensors["cls_embedding.embedding_table.weight"].shape[0] - 1
    config = LlamaGenConfig(
        hidden_size=width,
        num_hidden_layers=1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers.")),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=tensors["layers.0.feed_forward.w1.weight"].shape[0],
        vocab_size=vocabulary,
        grid_size=image_size // LlamaGenBackbone.patch_size,
        **condition,
    )
    with torch.device("meta"):
        model = LlamaGenModel(config)
    known = {name: value for name, value in tensors.items() if name != "freqs_cis"}  # a table that is computed
    known = {name: value.to(dtype) for name, value in known.items()}
    missing, unexpected = model.load_state_dict(known, strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(
            f"{checkpoint} doesn't hold a whole LlamaGen: missing {missing[:3] or 'nothing'}, not understood "
            f"{unexpected[:3] or 'nothing'}."
        )
    if vocabulary != image_tokenizer.config.num_vq_embeddings:
        raise ValueError(
            f"{vq} has {image_tokenizer.config.num_vq_embeddings} codes, the backbone draws {vocabulary}: they do not "
            "belong together."
        )
    words, encoder = None, None
    if text_encoder is not None and from_text:
        words = AutoTokenizer.from_pretrained(text_encoder, trust_remote_code=False)
        encoder = T5EncoderModel.from_pretrained(text_encoder, dtype=dtype, use_safetensors=True)
        if encoder.config.d_model != config.caption_width:
            raise ValueError(
                f"{text_encoder} has states of width {encoder.config.d_model}, the model was trained with "
                f"{config.caption_width}: it needs another T5."
            )
    pipe = SpatialSpeculativePipeline(
        model.eval(), words, image_tokenizer=image_tokenizer, text_encoder=encoder, verifier=SpatialDraftVerifier()
    )
    report(f"writing {target}")
    pipe.save_pretrained(target)


def expand_head_norms(tensors: dict[str, torch.Tensor], num_heads: int, num_key_value_heads: int) -> None:
    """Repeat the norms of queries and keys, stored once per group of heads, to one row a head, in place.

    Raises:
        ValueError: for a number of rows that doesn't divide the heads.
    """
    for name, value in tensors.items():
        heads = {"q_norm": num_heads, "k_norm": num_key_value_heads}.get(name.split(".")[-2] if "." in name else "")
        if heads is None or value.shape[0] == heads:
            continue
        if value.ndim != 2 or heads % value.shape[0]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, which {heads} heads can't share.")
        tensors[name] = value.repeat_interleave(heads // value.shape[0], dim=0)


def load_pickled_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a `.ckpt` or `.pt`, without running any of its code.

    Raises:
        ValueError: if it holds anything but tensors and plain values, or no tensors at all.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file: give the path of the downloaded checkpoint.")
    try:
        # Training scripts leave their parsed arguments beside the tensors: plain values in a plain object.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's errors are of many kinds
        raise ValueError(f"{path} can't be read as plain tensors: {str(error).splitlines()[0]}") from error
    for key in ("state_dict", "model", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors.")
    return tensors


def vq_model_from_vqgan(tensors: dict[str, torch.Tensor]) -> VQModel:
    """Diffusers' `VQModel` with the weights of a VQGAN as taming-transformers lays it out.

    Sizes are read from the tensors. Levels of that decoder are numbered from the finest, Diffusers' from the coarsest.

    Raises:
        ValueError: naming what is missing or left over.
    """
    levels = 1 + max((int(m[1]) for name in tensors if (m := re.match(r"encoder\.down\.(\d+)\.", name))), default=-1)
    if not levels or "quantize.embedding.weight" not in tensors:
        raise ValueError("The checkpoint has no encoder.down.* and quantize.embedding: it is no VQGAN.")
    widths = [tensors[f"encoder.down.{level}.block.0.conv1.weight"].shape[0] for level in range(levels)]
    blocks = sum(bool(re.fullmatch(r"encoder\.down\.0\.block\.\d+\.conv1\.weight", name)) for name in tensors)
    attended = any(re.match(r"(encoder\.down|decoder\.up)\.\d+\.attn\.", name) for name in tensors)
    if attended:
        raise ValueError("This VQGAN has attention outside its middle block, which is not supported.")
    downs, ups = ("DownEncoderBlock2D",) * levels, ("UpDecoderBlock2D",) * levels
    model = _vq_model(tensors, widths, blocks, downs, ups)
    renamed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.startswith(("encoder.", "decoder.", "quantize.embedding.", "quant_conv.", "post_quant_conv.")):
            new = _vqgan_name(name, levels)
            # Attention is a 1 x 1 convolution there, a linear layer here.
            renamed[new] = value.flatten(1) if "attentions" in new and value.ndim == 4 else value
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in renamed.items()}, strict=False)
    if missing or unexpected:
        raise ValueError(f"The VQGAN lacks {missing[:3] or 'nothing'} and has {unexpected[:3] or 'nothing'} too much.")
    return model.eval()


def _vq_model(
    tensors: dict[str, torch.Tensor], widths: list[int], blocks: int, downs: tuple[str, ...], ups: tuple[str, ...]
) -> VQModel:
    codes, width = tensors["quantize.embedding.weight"].shape
    return VQModel(
        down_block_types=downs,
        up_block_types=ups,
        block_out_channels=tuple(widths),
        layers_per_block=blocks,
        latent_channels=tensors["post_quant_conv.weight"].shape[0],
        num_vq_embeddings=codes,
        vq_embed_dim=width,
        lookup_from_codebook=True,
    )


def vq_model_from_llamagen(tensors: dict[str, torch.Tensor]) -> VQModel:
    """Diffusers' `VQModel` with the weights of LlamaGen's picture tokenizer; codes are stored normalised.

    Raises:
        ValueError: naming what is missing or left over.
    """
    found = [re.match(r"encoder\.conv_blocks\.(\d+)\.", name) for name in tensors]
    levels = 1 + max((int(match[1]) for match in found if match), default=-1)
    if not levels or "quantize.embedding.weight" not in tensors:
        raise ValueError("The checkpoint has no encoder.conv_blocks.* and quantize.embedding: no LlamaGen tokenizer.")
    widths = [tensors[f"encoder.conv_blocks.{level}.res.0.conv1.weight"].shape[0] for level in range(levels)]
    blocks = sum(bool(re.fullmatch(r"encoder\.conv_blocks\.0\.res\.\d+\.conv1\.weight", name)) for name in tensors)
    downs = ("DownEncoderBlock2D",) * (levels - 1) + ("AttnDownEncoderBlock2D",)
    ups = ("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * (levels - 1)
    model = _vq_model(tensors, widths, blocks, downs, ups)
    renamed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if not name.startswith(("encoder.", "decoder.", "quantize.embedding.", "quant_conv.", "post_quant_conv.")):
            continue
        new = _llamagen_name(name)
        # The deepest level has one attention head over all channels.
        renamed[new] = value.flatten(1) if "attentions" in new and value.ndim == 4 else value
    renamed["quantize.embedding.weight"] = torch.nn.functional.normalize(renamed["quantize.embedding.weight"].float())
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in renamed.items()}, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"The tokenizer lacks {missing[:3] or 'nothing'} and has {unexpected[:3] or 'nothing'} too much."
        )
    return model.eval()


def _llamagen_name(name: str) -> str:
    for old, new in (
        ("encoder.conv_blocks.", "encoder.down_blocks."),
        ("decoder.conv_blocks.", "decoder.up_blocks."),
        (".res.", ".resnets."),
        (".attn.", ".attentions."),
        (".nin_shortcut.", ".conv_shortcut."),
        (".downsample.", ".downsamplers.0."),
        (".upsample.", ".upsamplers.0."),
        (".mid.0.", ".mid_block.resnets.0."),
        (".mid.1.", ".mid_block.attentions.0."),
        (".mid.2.", ".mid_block.resnets.1."),
        (".norm_out.", ".conv_norm_out."),
    ):
        name = name.replace(old, new)
    if ".attentions." in name:
        for old, new in ((".norm.", ".group_norm."), (".q.", ".to_q."), (".k.", ".to_k."), (".v.", ".to_v.")):
            name = name.replace(old, new)
        name = name.replace(".proj_out.", ".to_out.0.")
    return name


def _vqgan_name(name: str, levels: int) -> str:
    name = re.sub(r"encoder\.down\.(\d+)\.", r"encoder.down_blocks.\1.", name)
    name = re.sub(r"decoder\.up\.(\d+)\.", lambda m: f"decoder.up_blocks.{levels - 1 - int(m[1])}.", name)
    for old, new in (
        (".block.", ".resnets."),
        (".nin_shortcut.", ".conv_shortcut."),
        (".downsample.", ".downsamplers.0."),
        (".upsample.", ".upsamplers.0."),
        (".mid.block_1.", ".mid_block.resnets.0."),
        (".mid.block_2.", ".mid_block.resnets.1."),
        (".mid.attn_1.norm.", ".mid_block.attentions.0.group_norm."),
        (".mid.attn_1.q.", ".mid_block.attentions.0.to_q."),
        (".mid.attn_1.k.", ".mid_block.attentions.0.to_k."),
        (".mid.attn_1.v.", ".mid_block.attentions.0.to_v."),
        (".mid.attn_1.proj_out.", ".mid_block.attentions.0.to_out.0."),
        (".norm_out.", ".conv_norm_out."),
    ):
        name = name.replace(old, new)
    return name


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty: give a new folder.")
