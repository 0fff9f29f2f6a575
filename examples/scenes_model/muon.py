"""Muon (kellerjordan.github.io/posts/muon): momentum in which each matrix is replaced by the nearest orthogonal one.

`torch.optim.Muon` computes in bfloat16, which CPUs without bfloat16 instructions emulate, one matrix at a time. Here
all matrices of one shape are processed in one batched float32 product, and each process handles only its share of them.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Apply Newton-Schulz iterations, which bring all singular values near one.

    Args:
        matrices: `float32 (n, rows, columns)`.
        steps: number of iterations.

    Returns:
        the same shape.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for weights with two or more dimensions; all dimensions but the first are flattened."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` is not used."""
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            momentum, shapes = group["momentum"], defaultdict(list)
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - momentum)
                shapes[(len(parameter), parameter[0].numel())].append(parameter)
            # Each process orthogonalizes its share of the matrices; the sum over processes then contains all of them.
            updates = {id(parameter): torch.zeros_like(parameter) for parameter in parameters}
            for shape, alike in shapes.items():
                mine = alike[rank::processes]
                if not mine:
                    continue
                nesterov = [p.grad.lerp(self.state[p]["momentum"], momentum).reshape(shape) for p in mine]
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, matrix in zip(mine, orthogonalize(torch.stack(nesterov)), strict=True):
                    updates[id(parameter)].copy_(matrix.reshape(parameter.shape) * scale)
            if processes > 1:
                flat = torch.cat([updates[id(p)].reshape(-1) for p in parameters])
                dist.all_reduce(flat)
                for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                    updates[id(p)] = part.view_as(p)
            for parameter in parameters:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(updates[id(parameter)], alpha=-group["lr"])
