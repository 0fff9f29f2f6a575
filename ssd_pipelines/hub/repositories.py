"""Find out what a folder or Hub repository holds: a backbone, draft heads, or a saved pipeline.

All errors from the Hub are turned into one-sentence messages here, so that they are the same for every loader.
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
    """Context manager that replaces errors from the Hub by one sentence: what was requested, and what to do.

    Args:
        name: the repository that is requested.
        revision: the revision that is requested.

    Raises:
        OSError: if the repository is missing or gated, has no such revision, the token is wrong, or there is no
            connection.
        ValueError: if `name` is neither a folder nor a valid repository name.
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
        raise OSError(f"{name} has no revision {revision!r}: give a branch, a tag or a full commit hash.") from error
    except HFValidationError as error:
        raise ValueError(
            f"{name} is neither a folder here nor the name of a Hub repository, which looks like user/name."
        ) from error
    except EntryNotFoundError:
        raise  # each caller handles a missing file in its own way
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise OSError(
                f"The Hub did not accept the token for {name}: log in again with `hf auth login`, or pass a valid "
                "`token`."
            ) from error
        if status == 403:
            raise OSError(
                f"The token has no permission to do this with {name}: use one with more permissions, see {_TOKENS}."
            ) from error
        reason = (error.server_message or str(error)).strip().splitlines()[0]
        raise OSError(f"The Hub answered {status} for {name}: {reason}") from error
    except OfflineModeIsEnabled as error:
        raise OSError(f"{name} is requested from the Hub, but HF_HUB_OFFLINE is set: unset it.") from error
    except HTTPError as error:  # the request never reached the Hub
        raise OSError(
            f"The Hub can't be reached to look for {name}: check the connection, or load what is in the cache with "
            "`local_files_only=True`."
        ) from error


_TOKENS = "https://huggingface.co/settings/tokens"


def read_json(
    name_or_path: str | os.PathLike[str], filename: str, subfolder: str | None = None, **hub: Any
) -> dict[str, Any] | None:
    """Read a JSON file from a folder or Hub repository.

    Args:
        name_or_path: the folder or Hub repository.
        filename: name of the file.
        subfolder: subfolder that holds the file.
        hub: any of `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Returns:
        the content; `None` if the folder or repository exists but the file does not, or if it is not in the cache and
        the call is offline.

    Raises:
        OSError, ValueError: if the repository can't be read; see `explained`.
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
            # Offline, a file that was never downloaded can't be told apart from one that does not exist.
            if is_offline(hub):
                return None
            raise OSError(
                f"{name_or_path} is not a local folder, and the Hub can't be reached to find it: check the connection."
            ) from error
        except EntryNotFoundError:
            return None
    return json.loads(path.read_text(encoding="utf-8"))


def is_offline(hub: dict[str, Any]) -> bool:
    """Return whether downloads are forbidden, by `local_files_only` among the arguments or by `HF_HUB_OFFLINE`."""
    return bool(hub.get("local_files_only")) or constants.HF_HUB_OFFLINE


def not_in_cache(name: str | os.PathLike[str], what: str) -> OSError:
    """Return the error of an offline load that needs files which were never downloaded.

    Args:
        name: the repository.
        what: the part that the cache holds, like "no config.json".
    """
    return OSError(
        f"{name} is not a local folder, and {what} of it is in the cache, where `local_files_only` or HF_HUB_OFFLINE "
        "forbids downloads: load it once with a connection."
    )


def repo_kind(
    name_or_path: str | os.PathLike[str], subfolder: str | None = None, **hub: Any
) -> tuple[RepoKind, dict[str, Any]]:
    """Find out what a folder or repository holds.

    Args:
        name_or_path: the folder or Hub repository.
        subfolder: subfolder to look in.
        hub: as in `read_json`.

    Returns:
        the kind, and the content of the JSON file that shows it: `model_index.json` or `config.json`.

    Raises:
        ValueError: if it holds neither a pipeline, draft heads nor a backbone.
        OSError: if it can't be read; see `explained`.
    """
    index = read_json(name_or_path, "model_index.json", subfolder, **hub)
    if index is not None:
        return "pipeline", index
    config = read_json(name_or_path, "config.json", subfolder, **hub)
    if config is None and ("llamagen" in str(name_or_path).lower() or any(Path(name_or_path).glob("*.pt"))):
        raise ValueError(
            f"{name_or_path} has no config.json; if it holds LlamaGen's published .pt file, convert that once with "
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
    """Download a saved pipeline, without pickles and without code.

    Args:
        repo_id: the Hub repository.
        variant: variant of the weight files, like "fp16".
        hub: as in `read_json`.

    Returns:
        the local folder.

    Raises:
        OSError, ValueError: if it can't be downloaded, or is not completely in the cache of an offline call; see
            `explained`.
    """
    weights = f"*.{variant}*.safetensors*" if variant else "*.safetensors*"
    patterns = ["*.json", "*.txt", "*.jinja", "*.model", weights]
    try:
        with explained(repo_id, hub.get("revision")):
            folder = snapshot_download(repo_id, allow_patterns=patterns, **hub)
            if variant:
                # Components without this variant are loaded from their plain files, as in Diffusers.
                plain = [part for part in Path(folder).iterdir() if part.is_dir() and not any(part.glob(weights))]
                if plain:
                    wanted = [*patterns, *(f"{part.name}/*.safetensors*" for part in plain)]
                    folder = snapshot_download(repo_id, allow_patterns=wanted, **hub)
            if is_offline(hub):
                _check_whole(repo_id, Path(folder))
    except LocalEntryNotFoundError as error:
        if is_offline(hub):
            raise not_in_cache(repo_id, "not every file") from error
        raise OSError(
            f"{repo_id} can't be downloaded completely, because the Hub can't be reached: try again."
        ) from error
    return folder


def _check_whole(repo_id: str, folder: Path) -> None:
    """Raise an error if a folder of the cache lacks a component; its loader checks the files of each component."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    parts = [name for name, entry in index.items() if isinstance(entry, list) and name[0] != "_" and entry[0]]
    in_the_root = (folder / "config.json").is_file()  # a backbone and its tokenizer may be stored there
    if not in_the_root and not all((folder / name).is_dir() for name in parts):
        raise not_in_cache(repo_id, "not every file")


def stored_shapes(file: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a safetensors file, by name, without reading the tensors."""
    with safe_open(file, "pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def commit_of(snapshot: str | os.PathLike[str]) -> str | None:
    """Return the commit hash that a folder of the Hub's cache belongs to; `None` for any other folder."""
    folder = Path(snapshot)
    return folder.name if folder.parent.name == "snapshots" else None


def local_path_reason(name: str, may_be_here: bool = False) -> str | None:
    """Return why a model's name can't be that of a Hub repository; `None` if it can.

    Without this check, a path of the training machine could be published with the heads, and would be useless
    elsewhere.

    Args:
        name: name of the model.
        may_be_here: accept the name even if a local folder has the same name, for callers who state explicitly that
            they mean the Hub repository.
    """
    if os.path.isabs(name) or name.startswith((".", "~")) or "\\" in name or re.match(r"[A-Za-z]:", name):
        return "is a path on this machine"
    if os.path.exists(name) and not may_be_here:
        return "is a folder here"
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) or "--" in name or ".." in name:
        return "does not look like user/name"
    return None
