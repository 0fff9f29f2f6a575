"""Load, switch, unload and save draft heads on a pipeline, with an interface like Diffusers' adapter loaders."""

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
    """Draft heads and the verifier settings that were loaded with them.

    Args:
        heads: the draft heads.
        verifier: the settings tuned for them; `None` if they came without any.
    """

    heads: SpatialDraftHeads
    verifier: Verifier | None = None


def load_head_set(
    source: str | os.PathLike[str], dtype: torch.dtype | None = None, subfolder: str | None = None, **kwargs: Any
) -> HeadSet:
    """Load draft heads from a folder or Hub repository, along with their `verifier_config.json` if there is one.

    Args:
        source: the folder or Hub repository.
        dtype: dtype of the heads, as in `ModelMixin.from_pretrained`.
        subfolder: subfolder of `source` that holds them.
        kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `variant`.

    Raises:
        ValueError, OSError: if they can't be loaded; the message is one sentence.
    """
    if subfolder:
        kwargs["subfolder"] = subfolder
    heads = SpatialDraftHeads.from_pretrained(source, dtype=dtype, **kwargs)
    arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
    config = hub.read_json(source, Verifier.config_name, subfolder, **arguments)
    return HeadSet(heads, None if config is None else verifier_from_config(config, source))


class SSDHeadsLoaderMixin:
    """Adds `load_ssd_heads`, `set_ssd_heads`, `list_ssd_heads`, `delete_ssd_heads` and related methods to a pipeline.

    A pipeline can hold several sets of heads, each with a name. At most one set is active: the pipeline drafts with it
    and saves it. The others stay in memory, on their device, until `delete_ssd_heads`.

    **The verifier.** Heads may come with a `verifier_config.json` that holds the settings tuned for them. The pipeline
    uses these settings while the heads are active, unless the user chose a verifier: as with a scheduler, a verifier
    that was given to the pipeline or assigned to `pipe.verifier` is never replaced. If the tuned settings leave
    `temperature`, `top_k` or `top_p` unset, the pipeline's current values are used. When the heads are removed, the
    previous verifier is restored.

    There is no `fuse`: draft heads do not change the backbone's weights, so there is nothing to merge.
    """

    backbone: Any
    tokenizer: Any
    heads: SpatialDraftHeads | None
    verifier: Any
    register_modules: Any
    adapter: Any
    _execution_device: torch.device

    _replaceable_verifier: Verifier | None = None
    """A verifier that the user did not choose: the default, a saved pipeline's, or one that came with heads."""
    _verifier_without_heads: Verifier | None = None
    """The verifier that was replaced by one that came with heads."""

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
            heads: a Hub repository, a folder, or a `SpatialDraftHeads` object.
            adapter_name: a name for these heads, so that several sets can be loaded; heads loaded without a name
                replace those that were loaded without one before.
            dtype: by default the backbone's.
            kwargs: `subfolder`, `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `variant`.

        Raises:
            ValueError: if the name is taken, the heads don't fit the backbone or their file is incomplete.
            OSError: if they can't be downloaded. The pipeline is unchanged after any of these errors.

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
            ValueError: if there are no heads of this name; the message lists the names that exist.
        """
        sets = self._head_sets()
        self._check_names([adapter_name], sets)
        self._activate(sets[adapter_name])

    def list_ssd_heads(self) -> list[str]:
        """Return the names of all draft heads on this pipeline."""
        return list(self._head_sets())

    def get_active_ssd_heads(self) -> str | None:
        """Return the name of the active draft heads; `None` if the pipeline decodes without heads."""
        for name, candidate in self._head_sets().items():
            if candidate.heads is self.heads:
                return name
        return None

    def delete_ssd_heads(self, adapter_names: str | Sequence[str]) -> None:
        """Remove draft heads by name; if the active ones are among them, the pipeline decodes autoregressively.

        Args:
            adapter_names: one name or several.

        Raises:
            ValueError: if a name is unknown; nothing is removed then.
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
        """Remove all draft heads; the pipeline decodes autoregressively again, bit for bit as before it had any."""
        self._head_sets().clear()
        self._activate(None)

    def save_ssd_heads(
        self, save_directory: str | os.PathLike[str], adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """Save draft heads: `config.json`, `diffusion_pytorch_model.safetensors` and `verifier_config.json`.

        For the active heads, the last file holds the current verifier if that drafts with heads. Otherwise it holds
        the verifier that was loaded with the heads.

        Args:
            save_directory: the folder to write.
            adapter_name: the heads to save; by default the active ones.
            kwargs: `variant`; with `push_to_hub=True` also those of `SpatialDraftHeads.push_to_hub`.

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
            settings.unlink()  # left over from other heads that were saved here
        chosen.heads.save_pretrained(save_directory, **kwargs)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _head_sets(self) -> dict[str, HeadSet]:
        sets: dict[str, HeadSet] = self.__dict__.setdefault("_named_head_sets", {})
        # Heads that were given to the pipeline as a component, or assigned to it, are not registered yet.
        if self.heads is not None and not any(known.heads is self.heads for known in sets.values()):
            sets[DEFAULT_NAME] = HeadSet(self.heads)
        return sets

    def _check_names(self, names: Sequence[str], sets: dict[str, HeadSet]) -> None:
        unknown = [name for name in names if name not in sets]
        if unknown:
            there = f"it has {', '.join(sets)}" if sets else "it has none"
            raise ValueError(f"This pipeline has no draft heads named {', '.join(unknown)}: {there}.")

    def _add_head_set(self, loaded: HeadSet, name: str) -> None:
        """Register heads under a name and activate them; raises before any change if they don't fit."""
        adapter = self.adapter()
        loaded.heads.check_compatible(adapter)
        if loaded.verifier is not None:
            loaded.verifier.check(adapter.grid(), loaded.heads)
        sets = self._head_sets()
        self._activate(loaded)
        sets[name] = loaded

    def _activate(self, chosen: HeadSet | None) -> None:
        # `save_pretrained` would skip a component that was None and then simply assigned.
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
        """Take over the head sets that another pipeline with the same components has loaded."""
        if isinstance(other, SSDHeadsLoaderMixin) and self.heads is other.heads:
            self.__dict__["_named_head_sets"] = dict(other._head_sets())
        if isinstance(other, SSDHeadsLoaderMixin) and self.verifier is other._replaceable_verifier:
            self._replaceable_verifier = other._replaceable_verifier
            self._verifier_without_heads = other._verifier_without_heads
