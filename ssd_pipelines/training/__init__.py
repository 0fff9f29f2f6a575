"""Training draft heads for a frozen backbone on pictures that it drew itself."""

from ssd_pipelines.training.distillation import TokenGrids, draw_token_grids
from ssd_pipelines.training.head_training import HeadTrainingConfig, describe_training, train_heads
from ssd_pipelines.training.prompts import clean_prompts, read_prompts


__all__ = [
    "HeadTrainingConfig",
    "TokenGrids",
    "clean_prompts",
    "describe_training",
    "draw_token_grids",
    "read_prompts",
    "train_heads",
]
