"""Datasets of the Hugging Face Hub: each file is fetched when it is first read.

Files are stored in the Hub's own cache, whose folders show the origin of a file::

    .../datasets--lerobot--pusht/snapshots/<commit>/meta/info.json

Guarantee: all files of a store belong to one commit. The Hub is asked only for names that begin with `hf://`. Otherwise
the owner of a name on the Hub could decide what is read in place of a missing local folder.
"""

from __future__ import annotations

import os
import re
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import package

__all__ = ["fetched", "hub_folder"]

_NAME = re.compile(r"(?:hf://datasets/)?([\w.-]+/[\w.-]+?)(?:@([^@]+))?/?")
_SNAPSHOT = re.compile(r"(.*)/datasets--([^/]+)/snapshots/([^/]+)/(.+)")


def hub_folder(path: str) -> str:
    """Fetch `meta` of a dataset of the Hub and return its folder; return any other path unchanged.

    Names on the Hub are `hf://datasets/owner/name`, optionally with `@revision`.

    Raises:
        FileNotFoundError: The path does not exist, or is a name on the Hub without `hf://datasets/`.
    """
    found = _NAME.fullmatch(path)
    if found is None or os.path.lexists(path):
        return path
    if not path.startswith("hf://"):
        what = f"there is no store at {path}, which is a path on this machine"
        raise FileNotFoundError(f"{what}; a dataset of the Hugging Face Hub is hf://datasets/{path}")
    repo, revision = found.groups()
    folder = _asked("snapshot_download", repo, revision=revision, allow_patterns="meta/*")
    if not os.path.exists(os.path.join(folder, "meta", "info.json")):
        what = f"{path}: the dataset {repo} of the Hub has no meta/info.json, as LeRobot's have"
        raise StoreError(f"{what}; give files by a pattern, 'hf://datasets/{repo}/**/*.parquet'")
    return folder


def fetched(path: str) -> str:
    """Return the path of a file, which is fetched if it belongs to the Hub."""
    if not os.path.exists(path) and (found := _SNAPSHOT.fullmatch(path.replace(os.sep, "/"))):
        cache, repo, commit, name = found.groups()
        _asked("hf_hub_download", repo.replace("--", "/", 1), filename=name, revision=commit, cache_dir=cache)
    return path


def _asked(function: str, repo: str, **options: Any) -> str:
    hub = package("huggingface_hub", f"{repo} of the Hub", "hub")
    try:
        answer: str = getattr(hub, function)(repo, repo_type="dataset", **options)
    except Exception as error:  # of the package, of what it asks with
        text = " ".join(str(error).split())
        what = options.get("filename") or options.get("revision") or "it"
        raise OSError(f"{repo} of the Hugging Face Hub: {what} cannot be fetched: {text}") from error
    return answer
