"""Telling apart what can be loaded: a backbone, draft heads, or a saved pipeline; locally or on the Hub."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError


RepoKind = Literal["pipeline", "heads", "backbone"]

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def read_json(name_or_path: str | os.PathLike[str], filename: str, **hub: Any) -> dict[str, Any] | None:
    """A JSON file of a folder or Hub repository; `None` if the folder or repository is there but not the file.

    Args:
        hub: any of `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.
    """
    if os.path.isdir(name_or_path):
        path = Path(name_or_path) / filename
        if not path.is_file():
            return None
    else:
        try:
            path = Path(hf_hub_download(str(name_or_path), filename, **hub))
        except LocalEntryNotFoundError as error:
            # Offline, a file that was never fetched and a file that does not exist look alike.
            if hub.get("local_files_only") or constants.HF_HUB_OFFLINE:
                return None
            raise OSError(f"{name_or_path} is no folder here, and the Hub can't be reached to look for it.") from error
        except EntryNotFoundError:
            return None
    return json.loads(path.read_text(encoding="utf-8"))


def repo_kind(name_or_path: str | os.PathLike[str], **hub: Any) -> tuple[RepoKind, dict[str, Any]]:
    """What a folder or repository holds, and the JSON that says so.

    Raises:
        ValueError: if it holds none of the three.
    """
    index = read_json(name_or_path, "model_index.json", **hub)
    if index is not None:
        return "pipeline", index
    config = read_json(name_or_path, "config.json", **hub)
    if config is None and ("llamagen" in str(name_or_path).lower() or any(Path(name_or_path).glob("*.pt"))):
        raise ValueError(
            f"{name_or_path} has no config.json; if it holds LlamaGen as published, a .pt file, convert that once with "
            "`ssd-pipelines convert llamagen` and load the folder that this writes."
        )
    if config is None:
        raise ValueError(
            f"{name_or_path} has neither a model_index.json (a saved pipeline) nor a config.json (a backbone or draft "
            "heads): give a Hub repository or a folder that has one."
        )
    return ("heads" if config.get("_class_name") == "SpatialDraftHeads" else "backbone"), config


def download_pipeline(repo_id: str, variant: str | None = None, **hub: Any) -> str:
    """Fetch a saved pipeline's files, without pickles and without code; returns the folder."""
    weights = f"*.{variant}*.safetensors*" if variant else "*.safetensors*"
    patterns = ["*.json", "*.txt", "*.jinja", "*.model", weights]
    return snapshot_download(repo_id, allow_patterns=patterns, **hub)
