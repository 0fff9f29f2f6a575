"""A `JanusVQVAE` without group norms for training, and its conversion to the stock class with the same output.

The stock class normalises 32 groups of channels over the whole picture. A small model has one channel per group, so
every norm removes that channel's mean. The colour of a plain background, which is most of such a picture, then hardly
reaches the pixels, and the look of a token depends on the rest of the picture. So training replaces each norm by a
scale and a shift.

`to_stock` writes the trained weights into the unchanged class with twice the channels. Every channel x becomes the pair
(x, -x), whose mean is zero, and the whole residual stream is scaled down until its variance is negligible compared with
the norm's epsilon. Then (x - mean) / sqrt(variance + epsilon) is x / sqrt(epsilon), which is a scale, as in training.
(Such weights need the exponent range of float32 or bfloat16; that of float16 is too narrow.)
"""

import copy

import torch
from torch import nn
from transformers import JanusVQVAE, JanusVQVAEConfig


STREAM_SCALE = 2.0**-18
EPSILON = 1e-6


class ChannelAffine(nn.Module):
    """Scales and shifts each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform `(batch, channels, height, width)` to the same shape."""
        return hidden_states * self.weight[:, None, None] + self.bias[:, None, None]


def plain_vqvae(stock_config: JanusVQVAEConfig) -> JanusVQVAE:
    """Return the trainable model, with half the channels of the stock configuration and no norms."""
    config = copy.deepcopy(stock_config)
    # `JanusVQVAE` creates group norms first, which need a multiple of 32 channels.
    config.base_channels = stock_config.base_channels // 2
    model = JanusVQVAE(config)
    for module in list(model.modules()):
        # The class initialises weights with 0.02, for large models; in this small one the signal would vanish.
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
        for name, child in list(module.named_children()):
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, ChannelAffine(child.num_channels))
    for name, module in model.named_modules():
        # Residual branches start at zero, so that training needs no norms.
        if name.endswith(("conv2", "proj_out")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model.to(memory_format=torch.channels_last)


def _paired(tensor: torch.Tensor, second: float) -> torch.Tensor:
    """`(n, ...)` to `(2n, ...)`: each entry is followed by `second` times the entry."""
    return torch.stack([tensor, second * tensor], 1).flatten(0, 1)


@torch.no_grad()
def to_stock(plain: JanusVQVAE, stock_config: JanusVQVAEConfig) -> JanusVQVAE:
    """Convert to an unchanged `JanusVQVAE` that computes the same output as `plain`.

    Args:
        plain: a trained model from `plain_vqvae`.
        stock_config: the configuration that `plain_vqvae` was called with.

    Raises:
        ValueError: if a weight of `plain` doesn't fit the stock configuration.
    """
    stock = JanusVQVAE(stock_config).eval()
    target = stock.state_dict()
    for name, tensor in plain.state_dict().items():
        *_, module, kind = name.split(".")
        outside_in = module == "conv_in"
        if name.startswith("quant") or name.startswith("post_quant"):
            value = tensor
        elif module.startswith("norm"):
            # Both channels of a pair (x, -x) give scale * x + shift; only the first is read.
            value = _paired(tensor, -1.0) * EPSILON**0.5 / STREAM_SCALE if kind == "weight" else _paired(tensor, 1.0)
        else:
            # conv_out writes the output, q, k and v stay inside the attention; all others write a pair to the stream.
            inside = module in ("q", "k", "v")
            value = tensor if module == "conv_out" else _paired(tensor, 0.0 if inside else -1.0)
            if module == "q":
                value = value * 2**0.5  # the class divides by the root of the number of channels, which has doubled
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
