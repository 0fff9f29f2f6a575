"""Train draft heads for a frozen backbone on pictures that the backbone itself generated."""

from ssd_pipelines.loading.fingerprint import weights_fingerprint
from ssd_pipelines.training.config import HeadTrainingConfig
from ssd_pipelines.training.distillation import TokenGrids, draw_token_grids
from ssd_pipelines.training.head_training import describe_training, measure_passes, train_heads
from ssd_pipelines.training.losses import StateReader
from ssd_pipelines.training.prompts import clean_prompts, read_prompts


__all__ = [
    "HeadTrainingConfig",
    "StateReader",
    "TokenGrids",
    "clean_prompts",
    "describe_training",
    "draw_token_grids",
    "measure_passes",
    "read_prompts",
    "train_heads",
    "weights_fingerprint",
]
