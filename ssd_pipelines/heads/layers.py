"""The layers that draft heads are made of.

Source: Spatially Speculative Decoding, arXiv 2606.20543, section 3.1, equations 2 and 3; ablations after its table 8.
"""

import torch
from torch import nn


class SwiGLU(nn.Module):
    """`W2(SiLU(W1 u) * W3 u)` without biases (equation 3)."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner_width, bias=False)
        self.w3 = nn.Linear(width, inner_width, bias=False)
        self.w2 = nn.Linear(inner_width, width, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(..., width)`; same shape and dtype."""
        return self.w2(nn.functional.silu(self.w1(u)) * self.w3(u))


class MLP(nn.Module):
    """`W2 SiLU(W1 u)` without biases: the ablation without a gate."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner_width, bias=False)
        self.w2 = nn.Linear(inner_width, width, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(..., width)`; same shape and dtype."""
        return self.w2(nn.functional.silu(self.w1(u)))


class GatedLayer(nn.Module):
    """`SwiGLU(RMSNorm(u))` (equation 2), shared by all heads if `shared_weights` is set."""

    def __init__(self, width: int, inner_width: int, architecture: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = (SwiGLU if architecture == "swiglu" else MLP)(width, inner_width)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(..., width)`; same shape and dtype."""
        return self.mlp(self.norm(u))


class DraftHead(nn.Module):
    """One draft head, for one direction and offset: `f(z) = W0 z + SwiGLU(RMSNorm(W0 z))` (equation 2)."""

    def __init__(self, input_width: int, width: int, inner_width: int, architecture: str) -> None:
        super().__init__()
        self.w0 = nn.Linear(input_width, width, bias=False)
        self.norm: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if architecture != "linear":
            self.norm = nn.RMSNorm(width, eps=1e-6)
            self.mlp = (SwiGLU if architecture == "swiglu" else MLP)(width, inner_width)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Predict a scaled state `(..., width)` from source features `(..., input_width)`."""
        projected = self.w0(z)
        if self.norm is None or self.mlp is None:
            return projected
        return projected + self.mlp(self.norm(projected))


def with_neighbors(z: torch.Tensor) -> torch.Tensor:
    """Concatenate the features of each cell with those of its left and right neighbours.

    Args:
        z: `(..., columns, f)`, the features of one row.

    Returns:
        `(..., columns, 3 * f)`: left neighbour, cell, right neighbour; zeros beyond the ends of the row.
    """
    padded = nn.functional.pad(z, (0, 0, 1, 1))
    return torch.cat([padded[..., :-2, :], z, padded[..., 2:, :]], dim=-1)
