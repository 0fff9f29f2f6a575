"""Loading, unloading and saving draft heads on a pipeline, in the shape of Diffusers' adapter loaders."""

import os
from typing import Any

import torch

from ssd_pipelines.backbones import wrap_backbone
from ssd_pipelines.heads import SpatialDraftHeads


class SSDHeadsLoaderMixin:
    """Gives a pipeline `load_ssd_heads`, `unload_ssd_heads` and `save_ssd_heads`.

    There is no `fuse`: draft heads are no change to the backbone that could be merged into it.
    """

    backbone: Any
    tokenizer: Any
    heads: SpatialDraftHeads | None
    register_modules: Any
    _execution_device: torch.device

    def load_ssd_heads(
        self, heads: str | os.PathLike[str] | SpatialDraftHeads, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        """Load draft heads and decode with them from the next call on.

        Args:
            heads: a Hub repository, a folder, or heads in memory.
            dtype: by default the backbone's.
            kwargs: `subfolder`, `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `variant`.

        Raises:
            ValueError: if the heads don't fit the backbone or their file is incomplete; the pipeline stays as it was.

        Example:
            >>> pipe.load_ssd_heads("user/ssd-janus-pro-7b")
        """
        if isinstance(heads, SpatialDraftHeads):
            loaded = heads
        else:
            loaded = SpatialDraftHeads.from_pretrained(heads, dtype=dtype or self.backbone.dtype, **kwargs)
        loaded.check_compatible(wrap_backbone(self.backbone, self.tokenizer))
        # Plain assignment of a component that was None would be forgotten by `save_pretrained`.
        self.register_modules(heads=loaded.to(self._execution_device).eval())

    def unload_ssd_heads(self) -> None:
        """Drop the draft heads; the pipeline decodes autoregressively again, bit for bit as before it had any."""
        self.register_modules(heads=None)

    def save_ssd_heads(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write `config.json` and `diffusion_pytorch_model.safetensors`, the head tensors alone.

        Args:
            kwargs: of `ModelMixin.save_pretrained`, like `variant` or `push_to_hub`.
        """
        if self.heads is None:
            raise ValueError("This pipeline has no draft heads to save: load some first.")
        self.heads.save_pretrained(save_directory, **kwargs)
