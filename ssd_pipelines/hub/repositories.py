"""Telling apart what can be loaded: a backbone, draft heads, or a saved pipeline; locally or on the Hub.

Whatever goes wrong at the Hub is said here in one sentence, by the same words for every loader.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open


RepoKind = Literal["pipeline", "heads", "backbone"]

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


@contextmanager
def explained(name: str | os.PathLike[str], revision: str | None = None) -> Iterator[None]:
    """Say what the Hub refuses in one sentence: what was asked for, and what to do.

    Raises:
        OSError: for a repository that is missing, gated or has no such revision, a wrong token, and no connection.
        ValueError: for what is neither a folder nor a name that a repository can have.
    """
    try:
        yield
    except GatedRepoError as error:
        raise OSError(
            f"{name} is gated: accept its conditions at {constants.ENDPOINT}/{name}, then log in with `hf auth login` "
            "or pass `token`."
        ) from error
    except RepositoryNotFoundError as error:
        raise OSError(
            f"There is no repository {name} on the Hub, or it is private: check the name, and log in with `hf auth "
            "login` or pass `token` if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise OSError(f"{name} has no revision {revision!r}: give a branch, a tag or a whole commit hash.") from error
    except HFValidationError as error:
        raise ValueError(
            f"{name} is neither a folder here nor the name of a Hub repository, which looks like user/name."
        ) from error
    except EntryNotFoundError:
        raise  # a missing file means something else to every caller
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise OSError(
                f"The Hub did not accept the token for {name}: log in again with `hf auth login`, or pass a valid "
                "`token`."
            ) from error
        if status == 403:
            raise OSError(f"The token may not do this with {name}: use one that may, see {_TOKENS}.") from error
        reason = (error.server_message or str(error)).strip().splitlines()[0]
        raise OSError(f"The Hub answered {status} for {name}: {reason}") from error
    except OfflineModeIsEnabled as error:
        raise OSError(f"{name} is asked of the Hub, but HF_HUB_OFFLINE is set: unset it for this.") from error
    except HTTPError as error:  # what never reached the Hub
        raise OSError(
            f"The Hub can't be reached to look for {name}: check the connection, or load what is in the cache with "
            "`local_files_only=True`."
        ) from error


_TOKENS = "https://huggingface.co/settings/tokens"


def read_json(
    name_or_path: str | os.PathLike[str], filename: str, subfolder: str | None = None, **hub: Any
) -> dict[str, Any] | None:
    """A JSON file of a folder or Hub repository; `None` if the folder or repository is there but not the file.

    Args:
        hub: any of `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises:
        OSError: in one sentence, for all that is wrong with the repository; see `explained`.
    """
    if os.path.isdir(name_or_path):
        path = Path(name_or_path) / (subfolder or "") / filename
        if not path.is_file():
            return None
    else:
        if subfolder:
            hub = {**hub, "subfolder": subfolder}
        try:
            with explained(name_or_path, hub.get("revision")):
                path = Path(hf_hub_download(str(name_or_path), filename, **hub))
        except LocalEntryNotFoundError as error:
            # Offline, a file that was never fetched and a file that does not exist look alike.
            if is_offline(hub):
                return None
            raise OSError(f"{name_or_path} is no folder here, and the Hub can't be reached to look for it.") from error
        except EntryNotFoundError:
            return None
    return json.loads(path.read_text(encoding="utf-8"))


def is_offline(hub: dict[str, Any]) -> bool:
    """Whether nothing is to be fetched: by an argument of the call, or by `HF_HUB_OFFLINE`."""
    return bool(hub.get("local_files_only")) or constants.HF_HUB_OFFLINE


def not_in_cache(name: str | os.PathLike[str], what: str) -> OSError:
    """The error of an offline load for what was never fetched."""
    return OSError(
        f"{name} is no folder here, and {what} of it is in the cache, where `local_files_only` or HF_HUB_OFFLINE "
        "forbids to fetch any: load it once with a connection."
    )


def repo_kind(
    name_or_path: str | os.PathLike[str], subfolder: str | None = None, **hub: Any
) -> tuple[RepoKind, dict[str, Any]]:
    """What a folder or repository holds, and the JSON that says so.

    Raises:
        ValueError: if it holds none of the three.
        OSError: if it can't be looked at; see `explained`.
    """
    index = read_json(name_or_path, "model_index.json", subfolder, **hub)
    if index is not None:
        return "pipeline", index
    config = read_json(name_or_path, "config.json", subfolder, **hub)
    if config is None and ("llamagen" in str(name_or_path).lower() or any(Path(name_or_path).glob("*.pt"))):
        raise ValueError(
            f"{name_or_path} has no config.json; if it holds LlamaGen as published, a .pt file, convert that once with "
            "`ssd-pipelines convert llamagen` and load the folder that this writes."
        )
    if config is None:
        if is_offline(hub) and not os.path.isdir(name_or_path):
            raise not_in_cache(name_or_path, "neither a model_index.json nor a config.json")
        place = f"{name_or_path}{f' in its folder {subfolder}' if subfolder else ''}"
        raise ValueError(
            f"{place} has neither a model_index.json (a saved pipeline) nor a config.json (a backbone or draft "
            "heads): give a Hub repository or a folder that has one."
        )
    return ("heads" if config.get("_class_name") == "SpatialDraftHeads" else "backbone"), config


def download_pipeline(repo_id: str, variant: str | None = None, **hub: Any) -> str:
    """Fetch a saved pipeline's files, without pickles and without code; returns the folder."""
    weights = f"*.{variant}*.safetensors*" if variant else "*.safetensors*"
    patterns = ["*.json", "*.txt", "*.jinja", "*.model", weights]
    try:
        with explained(repo_id, hub.get("revision")):
            folder = snapshot_download(repo_id, allow_patterns=patterns, **hub)
            if variant:
                # Components that have no such variant are loaded as they are, as in Diffusers.
                plain = [part for part in Path(folder).iterdir() if part.is_dir() and not any(part.glob(weights))]
                if plain:
                    wanted = [*patterns, *(f"{part.name}/*.safetensors*" for part in plain)]
                    folder = snapshot_download(repo_id, allow_patterns=wanted, **hub)
            if is_offline(hub):
                _check_whole(repo_id, Path(folder))
    except LocalEntryNotFoundError as error:
        if is_offline(hub):
            raise not_in_cache(repo_id, "not every file") from error
        raise OSError(f"{repo_id} can't be fetched whole, for the Hub can't be reached: try again.") from error
    return folder


def _check_whole(repo_id: str, folder: Path) -> None:
    """Refuse a folder of the cache without every component; which files one has is for its loader to say."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    parts = [name for name, entry in index.items() if isinstance(entry, list) and name[0] != "_" and entry[0]]
    in_the_root = (folder / "config.json").is_file()  # where a backbone and its tokenizer may lie
    if not in_the_root and not all((folder / name).is_dir() for name in parts):
        raise not_in_cache(repo_id, "not every file")


def stored_shapes(file: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file, by name; none of them is read."""
    with safe_open(file, "pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def commit_of(snapshot: str | os.PathLike[str]) -> str | None:
    """The commit whose files lie in a folder of the Hub's cache; `None` for any other folder."""
    folder = Path(snapshot)
    return folder.name if folder.parent.name == "snapshots" else None


def local_path_reason(name: str, may_be_here: bool = False) -> str | None:
    """Why a model's name can't be that of a Hub repository; `None` if it can.

    A path of the machine that trained would be published with the heads, and would lead nowhere elsewhere.

    Args:
        may_be_here: whether a folder of that name is no reason, as where somebody says that the Hub's name is meant.
    """
    if os.path.isabs(name) or name.startswith((".", "~")) or "\\" in name or re.match(r"[A-Za-z]:", name):
        return "is a path on this machine"
    if os.path.exists(name) and not may_be_here:
        return "is a folder here"
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) or "--" in name or ".." in name:
        return "does not look like user/name"
    return None
