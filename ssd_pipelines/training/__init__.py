"""Training draft heads for a frozen backbone on pictures that it drew itself."""

from ssd_pipelines.training.distillation import TokenGrids, draw_token_grids
from ssd_pipelines.training.head_training import HeadTrainingConfig, train_heads


__all__ = ["HeadTrainingConfig", "TokenGrids", "draw_token_grids", "train_heads"]
