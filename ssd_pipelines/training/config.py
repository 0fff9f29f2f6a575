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
"""The settings that describe the heads themselves; the names are those of [`SpatialDraftHeads`]."""

FREE_SETTINGS = ("gradient_accumulation", "checkpoint_every", "log_every", "validate_every", "validation_prompts")
"""Settings that may differ when a run is resumed, because they do not change the training steps."""


@dataclass(frozen=True)
class HeadTrainingConfig:
    """Settings of a training run; the defaults are the paper's (arXiv 2606.20543, table 8).

    Args:
        num_horizontal, num_vertical: number of heads of each direction (the paper: 5, and 1 or 2).
        horizontal_rows: number of rows, from the top, that the horizontal heads are trained on; they usually draft
            only the first row. `None` for all rows, which is needed for decoding along every row.
        neighborhood, row_head, inputs, states, target, architecture, shared_weights, inner_width: as in
            [`SpatialDraftHeads`]. The loss is Smooth-L1 for target "hidden", cross-entropy for "token".
        normalize_states: divide states by their root mean square, so that errors lie in the quadratic range of
            Smooth-L1; raw pre-norm states have an rms near 100.
        epochs, lr, min_lr, warmup_steps, weight_decay, betas: settings of AdamW and of the learning rate: linear
            warm-up, then cosine decay from `lr` to `min_lr`.
        batch_size: pictures per optimizer step, over all processes (the paper: 512, 128 or 32, over four GPUs).
        gradient_accumulation: number of parts in which each process computes its share of the batch, to save memory.
        prompt_dropout: share of pictures whose states come from the unconditional branch.
        alpha, beta: weights of the horizontal and the vertical heads' losses.
        kl_weight: weight of a second loss, the KL divergence between the backbone's distribution and the draft
            distribution; 0 in the paper.
        stale_share: share of pictures whose source states were computed in a pass over draft tokens, some of them
            wrong, as in decoding right after a correction. It needs a second pass over these pictures.
        validation_share: share of the pictures that are used for validation, not for training.
        validation_prompts: number of validation prompts that are decoded losslessly at the end, to count passes; 0 for
            none.
        max_grad_norm: maximum norm for gradient clipping.
        seed: seed of initial weights, order and dropout; a resumed run repeats the steps of an uninterrupted one.
        checkpoint_every, log_every: steps between checkpoints, and between reports of the loss.
        validate_every: steps between validations; by default once per epoch.

    Raises:
        ValueError: if a setting is out of range; the message says which values are allowed.
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
        """Return all settings by name."""
        return asdict(self)

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of the heads themselves, see `HEAD_SETTINGS`."""
        return {name: getattr(self, name) for name in HEAD_SETTINGS}

    def course(self) -> dict[str, Any]:
        """Return the settings that affect the trained weights; a checkpoint can only be resumed with the same ones."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in FREE_SETTINGS
        }

    def check_grid(self, grid: TokenGrid) -> None:
        """Check that every offset has targets within the grid, so that all heads can be trained.

        Raises:
            ValueError: for an offset or a number of rows that does not fit the grid.
        """
        for name, value, size in (
            ("num_horizontal", self.num_horizontal, grid.columns),
            ("num_vertical", self.num_vertical, grid.rows),
        ):
            if not 1 <= value < size:
                raise ValueError(
                    f"`{name}` must lie between 1 and {size - 1} on a grid of {grid.rows} x {grid.columns} codes, got "
                    f"{value}: a head with a larger offset has no target."
                )
        if self.horizontal_rows is not None and not 1 <= self.horizontal_rows <= grid.rows:
            raise ValueError(f"`horizontal_rows` must lie between 1 and {grid.rows}, got {self.horizontal_rows}.")

    def new_heads(self, backbone: Backbone, **settings: Any) -> SpatialDraftHeads:
        """Create untrained heads with these settings for a backbone; `settings` are added to them."""
        return SpatialDraftHeads.for_backbone(backbone, **self.head_settings(), **settings)
