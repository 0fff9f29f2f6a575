"""Settings of head training."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ssd_pipelines.backbones import Backbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads, StateKind, Target


HEAD_SETTINGS = (
    "num_horizontal",
    "num_vertical",
    "neighborhood",
    "row_head",
    "inputs",
    "states",
    "target",
    "architecture",
    "shared_weights",
    "inner_width",
)
"""What a run's settings say about the heads themselves; the names are those of [`SpatialDraftHeads`]."""

FREE_SETTINGS = ("gradient_accumulation", "checkpoint_every", "log_every", "validate_every", "validation_prompts")
"""What may differ when a run is resumed, for it changes no step."""


@dataclass(frozen=True)
class HeadTrainingConfig:
    """Settings of a run; the defaults are the paper's (arXiv 2606.20543, table 8).

    Args:
        num_horizontal, num_vertical: heads of each direction (the paper: 5, and 1 or 2).
        horizontal_rows: horizontal heads learn from so many rows at the top, since they draft the first alone; `None`
            for all rows, which decoding along every row needs.
        neighborhood, row_head, inputs, states, target, architecture, shared_weights, inner_width: as in
            [`SpatialDraftHeads`]. A target of "hidden" is matched by Smooth-L1, a "token" by cross-entropy.
        normalize_states: divide states by their root mean square, so that Smooth-L1 is quadratic where it should be:
            raw pre-norm states have one near 100.
        epochs, lr, min_lr, warmup_steps, weight_decay, betas: of AdamW; linear warm-up, cosine decay.
        batch_size: pictures an optimizer step over all processes (the paper: 512, 128 or 32, over four GPUs).
        gradient_accumulation: each process computes its share of the batch in so many parts, for less memory.
        prompt_dropout: share of pictures whose states come from the unconditional branch.
        alpha, beta: weights of the horizontal and the vertical heads' losses.
        kl_weight: weight of a second loss, the divergence of the draft distribution from the backbone's; 0 in the
            paper.
        stale_share: share of pictures whose source states were computed beside drafts, some of them wrong, as in
            decoding: `inputs` then are what a head meets right after a correction. Costs a second pass over these.
        validation_share: share of the pictures that is kept from training and measured on.
        validation_prompts: so many of their prompts are drawn losslessly at the end, to count passes; 0 for none.
        max_grad_norm: gradient clipping.
        seed: of weights, order and dropout; a resumed run takes the same course.
        checkpoint_every, log_every: steps between checkpoints, and between reports of the loss.
        validate_every: steps between measurements; by default once an epoch.

    Raises:
        ValueError: naming the setting, what was given and what is allowed.
    """

    num_horizontal: int = 5
    num_vertical: int = 1
    horizontal_rows: int | None = None
    neighborhood: Literal["cell", "three"] = "cell"
    row_head: bool = False
    inputs: Literal["hidden", "embedding", "both"] = "both"
    states: StateKind = "pre_norm"
    target: Target = "hidden"
    architecture: Literal["swiglu", "mlp", "linear"] = "swiglu"
    shared_weights: bool = False
    inner_width: int | None = None
    normalize_states: bool = True
    epochs: int = 3
    batch_size: int = 128
    gradient_accumulation: int = 1
    lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_steps: int = 20
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    prompt_dropout: float = 0.1
    alpha: float = 1.0
    beta: float = 1.0
    kl_weight: float = 0.0
    stale_share: float = 0.0
    validation_share: float = 0.05
    validation_prompts: int = 8
    max_grad_norm: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    log_every: int = 10
    validate_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "gradient_accumulation", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("prompt_dropout", "stale_share", "validation_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must lie in [0, 1], got {getattr(self, name)}.")
        for name in ("lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be greater than 0, got {getattr(self, name)}.")
        for name in ("min_lr", "alpha", "beta", "kl_weight", "validation_prompts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def head_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in HEAD_SETTINGS}

    def course(self) -> dict[str, Any]:
        """The settings that decide what is learnt; a checkpoint belongs to them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in FREE_SETTINGS
        }

    def check_grid(self, grid: TokenGrid) -> None:
        """Refuse offsets that lead out of the picture: their heads would have nothing to learn from.

        Raises:
            ValueError: naming the offset and the grid.
        """
        for name, value, size in (
            ("num_horizontal", self.num_horizontal, grid.columns),
            ("num_vertical", self.num_vertical, grid.rows),
        ):
            if not 1 <= value < size:
                raise ValueError(
                    f"`{name}` must lie between 1 and {size - 1} on a grid of {grid.rows} x {grid.columns} codes, got "
                    f"{value}: a head farther out has no target."
                )
        if self.horizontal_rows is not None and not 1 <= self.horizontal_rows <= grid.rows:
            raise ValueError(f"`horizontal_rows` must lie between 1 and {grid.rows}, got {self.horizontal_rows}.")

    def new_heads(self, backbone: Backbone, **settings: Any) -> SpatialDraftHeads:
        """Untrained heads of these settings for a backbone."""
        return SpatialDraftHeads.for_backbone(backbone, **self.head_settings(), **settings)
