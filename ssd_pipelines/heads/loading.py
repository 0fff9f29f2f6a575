"""Loading, switching, unloading and saving draft heads on a pipeline, in the shape of Diffusers' adapter loaders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssd_pipelines import hub
from ssd_pipelines.heads.model import SpatialDraftHeads
from ssd_pipelines.verifiers import Verifier, verifier_from_config


DEFAULT_NAME = "default"
SAMPLING = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class HeadSet:
    """Draft heads under a name on a pipeline.

    Args:
        heads: the heads.
        verifier: the settings tuned for them, where they came with some.
    """

    heads: SpatialDraftHeads
    verifier: Verifier | None = None


def load_head_set(
    source: str | os.PathLike[str], dtype: torch.dtype | None = None, subfolder: str | None = None, **kwargs: Any
) -> HeadSet:
    """Draft heads of a folder or Hub repository, with the `verifier_config.json` beside them if there is one.

    Args:
        kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `variant`.

    Raises:
        ValueError, OSError: in one sentence, if they can't be loaded.
    """
    if subfolder:
        kwargs["subfolder"] = subfolder
    heads = SpatialDraftHeads.from_pretrained(source, dtype=dtype, **kwargs)
    arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
    config = hub.read_json(source, Verifier.config_name, subfolder, **arguments)
    return HeadSet(heads, None if config is None else verifier_from_config(config, source))


class SSDHeadsLoaderMixin:
    """Gives a pipeline `load_ssd_heads`, `set_ssd_heads`, `list_ssd_heads`, `delete_ssd_heads` and their kin.

    Several sets of heads can be on one pipeline, each under a name; one of them, or none, is active, and is what the
    pipeline drafts with and saves. The others stay where they are in memory until `delete_ssd_heads`.

    **The verifier.** Heads may bring a `verifier_config.json` with the settings tuned for them. The pipeline takes it
    over while they are active, unless the user chose a verifier: as with a scheduler, what was given to the pipeline
    or assigned to `pipe.verifier` is never replaced. Tuned settings that leave `temperature`, `top_k` or `top_p` open
    take over those of the pipeline. When the heads go, the verifier of before comes back.

    There is no `fuse`: draft heads are no change to the backbone that could be merged into it.
    """

    backbone: Any
    tokenizer: Any
    heads: SpatialDraftHeads | None
    verifier: Any
    register_modules: Any
    adapter: Any
    _execution_device: torch.device

    _replaceable_verifier: Verifier | None = None
    """The verifier that nobody chose: the default, a saved pipeline's, or what heads brought."""
    _verifier_without_heads: Verifier | None = None
    """What heads with settings of their own have replaced."""

    def load_ssd_heads(
        self,
        heads: str | os.PathLike[str] | SpatialDraftHeads,
        adapter_name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Load draft heads and decode with them from the next call on.

        Args:
            heads: a Hub repository, a folder, or heads in memory.
            adapter_name: a name to keep them under beside others; without one they take the place of those that were
                loaded without one.
            dtype: by default the backbone's.
            kwargs: `subfolder`, `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `variant`.

        Raises:
            ValueError: if the name is taken, the heads don't fit the backbone or their file is incomplete.
            OSError: if they can't be fetched. The pipeline stays as it was in every case.

        Example:
            >>> pipe.load_ssd_heads("user/ssd-janus-pro-7b", adapter_name="fast")
            >>> pipe.load_ssd_heads("user/ssd-janus-pro-7b", adapter_name="older", revision="v1")
            >>> pipe.set_ssd_heads("fast")
        """
        if adapter_name is not None and adapter_name in self._head_sets():
            raise ValueError(
                f"This pipeline already has draft heads named {adapter_name!r}: choose another name, or "
                f"`delete_ssd_heads({adapter_name!r})` first."
            )
        if isinstance(heads, SpatialDraftHeads):
            loaded = HeadSet(heads)
        else:
            loaded = load_head_set(heads, dtype or self.backbone.dtype, **kwargs)
        self._add_head_set(loaded, adapter_name or DEFAULT_NAME)

    def set_ssd_heads(self, adapter_name: str) -> None:
        """Decode with the heads of this name from the next call on.

        Raises:
            ValueError: if there are none, listing those that there are.
        """
        sets = self._head_sets()
        self._check_names([adapter_name], sets)
        self._activate(sets[adapter_name])

    def list_ssd_heads(self) -> list[str]:
        """Names of all heads on this pipeline."""
        return list(self._head_sets())

    def get_active_ssd_heads(self) -> str | None:
        """Name of the heads that it decodes with; `None` if it decodes without."""
        for name, candidate in self._head_sets().items():
            if candidate.heads is self.heads:
                return name
        return None

    def delete_ssd_heads(self, adapter_names: str | Sequence[str]) -> None:
        """Drop heads by name; if the active ones are among them, the pipeline decodes autoregressively.

        Raises:
            ValueError: if there are none of a name; nothing is dropped then.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        sets = self._head_sets()
        self._check_names(names, sets)
        active = self.get_active_ssd_heads()
        for name in names:
            del sets[name]
        if active in names:
            self._activate(None)

    def unload_ssd_heads(self) -> None:
        """Drop all draft heads; the pipeline decodes autoregressively again, bit for bit as before it had any."""
        self._head_sets().clear()
        self._activate(None)

    def save_ssd_heads(
        self, save_directory: str | os.PathLike[str], adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """Write `config.json`, `diffusion_pytorch_model.safetensors` and the `verifier_config.json` that goes with it.

        The latter is the present verifier if that drafts with heads, else what the heads came with.

        Args:
            adapter_name: which heads; by default the active ones.
            kwargs: `variant`; and with `push_to_hub=True` those of `SpatialDraftHeads.push_to_hub`.

        Raises:
            ValueError: if there are no such heads.
        """
        name = adapter_name or self.get_active_ssd_heads()
        if name is None:
            raise ValueError("This pipeline has no draft heads to save: load some first.")
        self._check_names([name], self._head_sets())
        chosen = self._head_sets()[name]
        present = self.verifier if chosen.heads is self.heads and self.verifier.needs_heads else None
        verifier = present or chosen.verifier
        settings = Path(save_directory) / Verifier.config_name
        if verifier is not None:
            verifier.save_pretrained(save_directory)
        elif settings.is_file():
            settings.unlink()  # of other heads that were saved here
        chosen.heads.save_pretrained(save_directory, **kwargs)

    # --- what keeps them together -----------------------------------------------------------------------------------

    def _head_sets(self) -> dict[str, HeadSet]:
        sets: dict[str, HeadSet] = self.__dict__.setdefault("_named_head_sets", {})
        # Heads given to the pipeline as a component, or assigned to it, have not been loaded here.
        if self.heads is not None and not any(known.heads is self.heads for known in sets.values()):
            sets[DEFAULT_NAME] = HeadSet(self.heads)
        return sets

    def _check_names(self, names: Sequence[str], sets: dict[str, HeadSet]) -> None:
        unknown = [name for name in names if name not in sets]
        if unknown:
            there = f"it has {', '.join(sets)}" if sets else "it has none"
            raise ValueError(f"This pipeline has no draft heads named {', '.join(unknown)}: {there}.")

    def _add_head_set(self, loaded: HeadSet, name: str) -> None:
        """Take heads on under a name and activate them; refuses, before any change, what doesn't fit."""
        adapter = self.adapter()
        loaded.heads.check_compatible(adapter)
        if loaded.verifier is not None:
            loaded.verifier.check(adapter.grid(), loaded.heads)
        sets = self._head_sets()
        self._activate(loaded)
        sets[name] = loaded

    def _activate(self, chosen: HeadSet | None) -> None:
        # Plain assignment of a component that was None would be forgotten by `save_pretrained`.
        self.register_modules(heads=None if chosen is None else chosen.heads.to(self._execution_device).eval())
        if self.verifier is not self._replaceable_verifier:
            self._verifier_without_heads = None
            return
        plain: Any = self._verifier_without_heads or self.verifier
        wanted = plain
        tuned = None if chosen is None else chosen.verifier
        if tuned is not None:
            open_ones = {name: plain.config.get(name) for name in SAMPLING if tuned.config[name] is None}
            wanted = type(tuned).from_config(tuned.config, **open_ones)
        self._verifier_without_heads = None if tuned is None else plain
        self._replaceable_verifier = wanted
        self.register_modules(verifier=wanted)

    def _share_heads_of(self, other: Any) -> None:
        """Know the heads that another pipeline around the same components has loaded."""
        if isinstance(other, SSDHeadsLoaderMixin) and self.heads is other.heads:
            self.__dict__["_named_head_sets"] = dict(other._head_sets())
        if isinstance(other, SSDHeadsLoaderMixin) and self.verifier is other._replaceable_verifier:
            self._replaceable_verifier = other._replaceable_verifier
            self._verifier_without_heads = other._verifier_without_heads
