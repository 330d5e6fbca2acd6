"""Which tars a store is made of: a folder's, a pattern's, or those of a list.

Guarantee: the order is that of the names, numbers in them counting as numbers, or the list's and the braces' own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.patterns import matching
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams.cache.file_cache import FileCache, is_url

__all__ = ["find_shards"]


def find_shards(path: str, names: Sequence[str] | None, cache: FileCache | None = None) -> list[str]:
    """The paths or URLs of a store's tars, in order.

    Args:
        path: A folder, a tar, or a pattern of tars: `{000..015}`, `{a,b}` and `*` in paths and URLs, `?` and `[...]`
            in paths. With names: the folder or URL that they are relative to.
        names: Names, paths, URLs or patterns; None takes what the path says.
        cache: See `patterns.matching`.

    Raises:
        FileNotFoundError: There is nothing there.
        StoreError: A folder has no tars.
        ValueError: A pattern that means more than a store may have.
    """
    if names is not None:
        found = [shard for name in names for shard in matching(_joined(path, name), cache)]
    elif not is_url(path) and os.path.isdir(path):
        found = [os.path.join(path, name) for name in sorted(os.listdir(path), key=natural_order) if _is_tar(name)]
        if not found:
            raise StoreError(f"{path} has no tars: no name in it ends with .tar; give their folder, or a pattern")
    else:
        found = list(matching(path, cache))
    return found


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz")) and not name.startswith(".")


def _joined(path: str, name: str) -> str:
    if is_url(name) or os.path.isabs(name):
        return name
    return f"{path.rstrip('/')}/{name}" if is_url(path) else os.path.join(path, name)
