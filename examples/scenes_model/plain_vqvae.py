"""`JanusVQVAE` trained without its group norms, and the stock class that computes the same.

The stock class normalises 32 groups of channels over the whole picture. A small model has one channel a group, so every
norm takes away that channel's mean: the colour of a plain background, which is most of such a picture, hardly reaches
the pixels, and what a token looks like depends on everything else in the picture. So training replaces each norm by a
scale and a shift.

`to_stock` writes the trained weights into the unchanged class, with twice the channels: every channel x becomes the
pair (x, -x), whose mean is zero, and the whole residual stream is scaled down so far that its variance vanishes beside
the norm's epsilon. Then (x - mean) / sqrt(variance + epsilon) is x / sqrt(epsilon): a scale, as trained. (Such weights
need the exponent range of float32 or bfloat16; float16 is too narrow.)
"""

import copy

import torch
from torch import nn
from transformers import JanusVQVAE, JanusVQVAEConfig


STREAM_SCALE = 2.0**-18
EPSILON = 1e-6


class ChannelAffine(nn.Module):
    """Scale and shift of each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight[:, None, None] + self.bias[:, None, None]


def plain_vqvae(stock_config: JanusVQVAEConfig) -> JanusVQVAE:
    """The trainable model: half the channels of the stock configuration, no norms."""
    config = copy.deepcopy(stock_config)
    # The class builds group norms first, which need multiples of 32 channels.
    config.base_channels = stock_config.base_channels // 2
    model = JanusVQVAE(config)
    for module in list(model.modules()):
        # The class's own start, 0.02 for every weight, is made for large models: here the signal would fade on its way.
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
        for name, child in list(module.named_children()):
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, ChannelAffine(child.num_channels))
    for name, module in model.named_modules():
        # Branches of the residual stream start closed, which is what norms are otherwise needed for.
        if name.endswith(("conv2", "proj_out")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model.to(memory_format=torch.channels_last)


def _paired(tensor: torch.Tensor, second: float) -> torch.Tensor:
    """(n, ...) -> (2n, ...): each entry, then `second` times it."""
    return torch.stack([tensor, second * tensor], 1).flatten(0, 1)


@torch.no_grad()
def to_stock(plain: JanusVQVAE, stock_config: JanusVQVAEConfig) -> JanusVQVAE:
    """An unchanged `JanusVQVAE` that computes what `plain` computes."""
    stock = JanusVQVAE(stock_config).eval()
    target = stock.state_dict()
    for name, tensor in plain.state_dict().items():
        *_, module, kind = name.split(".")
        outside_in = module == "conv_in"
        if name.startswith("quant") or name.startswith("post_quant"):
            value = tensor
        elif module.startswith("norm"):
            # On the pair (x, -x) both give scale * x + shift; only the first is used.
            value = _paired(tensor, -1.0) * EPSILON**0.5 / STREAM_SCALE if kind == "weight" else _paired(tensor, 1.0)
        else:
            # conv_out leaves the stream; q, k, v live inside the attention; all others write a pair into the stream.
            inside = module in ("q", "k", "v")
            value = tensor if module == "conv_out" else _paired(tensor, 0.0 if inside else -1.0)
            if module == "q":
                value = value * 2**0.5  # the class divides by the root of the channels, now twice as many
            reads_stream = module in ("conv", "nin_shortcut")
            if module != "conv_out" and not inside and not (kind == "weight" and reads_stream):
                value = value * STREAM_SCALE
            if kind == "weight" and not outside_in:
                value = _paired(value.transpose(0, 1), 0.0).transpose(0, 1)
        if value.shape != target[name].shape:
            raise ValueError(f"{name}: {tuple(value.shape)} does not fit {tuple(target[name].shape)}.")
        target[name] = value.contiguous()
    stock.load_state_dict(target)
    return stock
