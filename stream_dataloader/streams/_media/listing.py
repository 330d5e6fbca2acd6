"""Listing of folders, archives and servers without the files that systems and programs leave behind.

Guarantee: streams and stores list folders only with these functions. A folder that cannot be read is an error.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator
from typing import Any

from stream_dataloader.streams._media.section import natural_order

__all__ = ["entries_in", "files_below", "is_hidden", "without_hidden"]

#: Further hidden names, of macOS, Windows, Synology and ext4, beside those that begin with a dot.
_LEFT_BEHIND = frozenset(
    {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"}
    | {"@eadir", "#recycle", "lost+found"}
)


def is_hidden(path: str) -> bool:
    """Return whether a relative path contains a hidden name: `._a.npy`, `.ipynb_checkpoints/a.npy`."""
    return any(map(_is_hidden_name, path.replace(os.sep, "/").split("/")))


def _is_hidden_name(name: str) -> bool:
    return (name.startswith(".") and name not in (".", "..")) or name.lower() in _LEFT_BEHIND


def entries_in(folder: str, *, hidden: bool = False) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in natural order; `hidden` includes hidden ones."""
    with os.scandir(folder) as entries:
        return sorted((one for one in entries if hidden or not _is_hidden_name(one.name)), key=_order_of)


def _order_of(entry: os.DirEntry[str]) -> Any:
    return natural_order(entry.name)


def files_below(folder: str, suffixes: str | tuple[str, ...] = "") -> list[str]:
    """Return the paths of all files below a folder with these suffixes, in natural order, without hidden ones.

    Links to folders are not followed.
    """
    return sorted((path for path in _walk(folder) if path.endswith(suffixes)), key=natural_order)


def _walk(folder: str) -> Iterator[str]:
    folders = [folder]
    while folders:  # no recursion, because folders may be a thousand levels deep
        for entry in entries_in(folders.pop()):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif not entry.is_dir():
                yield entry.path


def without_hidden(paths: Iterable[str], pattern: str) -> list[str]:
    """Return the paths that a pattern matched in natural order, without hidden names that it does not ask for.

    A hidden part of the pattern asks for hidden names: `".cache/*.npy"`, `".*.npy"`.
    """
    spelled = [part for part in pattern.replace(os.sep, "/").split("/") if _is_hidden_name(part)]

    def is_wanted(path: str) -> bool:
        hidden = filter(_is_hidden_name, path.replace(os.sep, "/").split("/"))
        return all(any(fnmatch.fnmatchcase(name, part) for part in spelled) for name in hidden)

    return sorted(filter(is_wanted, paths), key=natural_order)
