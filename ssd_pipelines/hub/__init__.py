"""Read repositories from the Hub or from a local folder."""

from ssd_pipelines.hub.repositories import (
    HUB_ARGUMENTS,
    RepoKind,
    commit_of,
    download_pipeline,
    explained,
    is_offline,
    local_path_reason,
    not_in_cache,
    read_json,
    repo_kind,
    stored_shapes,
)


__all__ = [
    "HUB_ARGUMENTS",
    "RepoKind",
    "commit_of",
    "download_pipeline",
    "explained",
    "is_offline",
    "local_path_reason",
    "not_in_cache",
    "read_json",
    "repo_kind",
    "stored_shapes",
]
