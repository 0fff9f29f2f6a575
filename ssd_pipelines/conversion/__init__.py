"""Convert published checkpoints into folders that `from_pretrained` loads."""

from ssd_pipelines.conversion.checkpoints import convert_llamagen, convert_lumina_mgpt, expand_head_norms
from ssd_pipelines.conversion.files import load_pickled_tensors
from ssd_pipelines.conversion.picture_tokenizers import vq_model_from_llamagen, vq_model_from_vqgan


__all__ = [
    "convert_llamagen",
    "convert_lumina_mgpt",
    "expand_head_norms",
    "load_pickled_tensors",
    "vq_model_from_llamagen",
    "vq_model_from_vqgan",
]
