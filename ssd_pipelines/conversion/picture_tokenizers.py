"""Convert published picture tokenizers to Diffusers' `VQModel`."""

import re

import torch
from diffusers import VQModel

from ssd_pipelines.conversion.files import load_whole, reading, shape_of


def vq_model_from_vqgan(tensors: dict[str, torch.Tensor], source: str = "The checkpoint") -> VQModel:
    """Convert a VQGAN in the layout of taming-transformers to Diffusers' `VQModel`.

    Sizes are read from the tensors. That decoder numbers its levels from the finest, Diffusers from the coarsest.

    Args:
        tensors: tensors of the checkpoint, by name.
        source: name of the checkpoint for error messages.

    Raises:
        ValueError: if tensors are missing, left over or of another shape; the message names them.
    """
    levels = 1 + max((int(m[1]) for name in tensors if (m := re.match(r"encoder\.down\.(\d+)\.", name))), default=-1)
    if not levels or "quantize.embedding.weight" not in tensors:
        raise ValueError(f"{source} has no encoder.down.* and quantize.embedding: it is not a VQGAN.")
    convolutions = [f"encoder.down.{level}.block.0.conv1.weight" for level in range(levels)]
    widths = [shape_of(tensors, name, 4, source)[0] for name in convolutions]
    blocks = sum(bool(re.fullmatch(r"encoder\.down\.0\.block\.\d+\.conv1\.weight", name)) for name in tensors)
    attended = any(re.match(r"(encoder\.down|decoder\.up)\.\d+\.attn\.", name) for name in tensors)
    if attended:
        raise ValueError(f"{source} has attention outside its middle block, which is not supported.")
    downs, ups = ("DownEncoderBlock2D",) * levels, ("UpDecoderBlock2D",) * levels
    model = _vq_model(tensors, widths, blocks, downs, ups, source)
    renamed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.startswith(("encoder.", "decoder.", "quantize.embedding.", "quant_conv.", "post_quant_conv.")):
            new = _vqgan_name(name, levels)
            # Attention projections are 1 x 1 convolutions in taming-transformers, linear layers in Diffusers.
            renamed[new] = value.flatten(1) if "attentions" in new and value.ndim == 4 else value
    load_whole(model, {name: value.float() for name, value in renamed.items()}, source)
    return model.eval()


def _vq_model(
    tensors: dict[str, torch.Tensor],
    widths: list[int],
    blocks: int,
    downs: tuple[str, ...],
    ups: tuple[str, ...],
    source: str,
) -> VQModel:
    codes, width = shape_of(tensors, "quantize.embedding.weight", 2, source)
    channels = shape_of(tensors, "post_quant_conv.weight", 4, source)[0]
    with reading(source, "as a picture tokenizer"):
        return VQModel(
            down_block_types=downs,
            up_block_types=ups,
            block_out_channels=tuple(widths),
            layers_per_block=blocks,
            latent_channels=channels,
            num_vq_embeddings=codes,
            vq_embed_dim=width,
            lookup_from_codebook=True,
        )


def vq_model_from_llamagen(tensors: dict[str, torch.Tensor], source: str = "The checkpoint") -> VQModel:
    """Convert LlamaGen's picture tokenizer to Diffusers' `VQModel`; the codebook is stored normalised.

    Args:
        tensors: tensors of the checkpoint, by name.
        source: name of the checkpoint for error messages.

    Raises:
        ValueError: if tensors are missing, left over or of another shape; the message names them.
    """
    found = [re.match(r"encoder\.conv_blocks\.(\d+)\.", name) for name in tensors]
    levels = 1 + max((int(match[1]) for match in found if match), default=-1)
    if not levels or "quantize.embedding.weight" not in tensors:
        raise ValueError(f"{source} has no encoder.conv_blocks.* and quantize.embedding: no LlamaGen tokenizer.")
    convolutions = [f"encoder.conv_blocks.{level}.res.0.conv1.weight" for level in range(levels)]
    widths = [shape_of(tensors, name, 4, source)[0] for name in convolutions]
    blocks = sum(bool(re.fullmatch(r"encoder\.conv_blocks\.0\.res\.\d+\.conv1\.weight", name)) for name in tensors)
    downs = ("DownEncoderBlock2D",) * (levels - 1) + ("AttnDownEncoderBlock2D",)
    ups = ("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * (levels - 1)
    model = _vq_model(tensors, widths, blocks, downs, ups, source)
    renamed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if not name.startswith(("encoder.", "decoder.", "quantize.embedding.", "quant_conv.", "post_quant_conv.")):
            continue
        new = _llamagen_name(name)
        # The deepest level has one attention head over all channels.
        renamed[new] = value.flatten(1) if "attentions" in new and value.ndim == 4 else value
    renamed["quantize.embedding.weight"] = torch.nn.functional.normalize(renamed["quantize.embedding.weight"].float())
    load_whole(model, {name: value.float() for name, value in renamed.items()}, source)
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
