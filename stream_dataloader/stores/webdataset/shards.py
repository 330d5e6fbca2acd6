"""Which tars a store is made of: a folder's, a pattern's, or those of a list.

Guarantee: the order is that of the names, numbers in them counting as numbers, or the list's and the braces' own.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence

from stream_dataloader.errors import StoreError
from stream_dataloader.streams.cache.file_cache import is_url, local_path
from stream_dataloader.streams.images import in_order

__all__ = ["expanded", "find_shards"]

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 1_000_000


def find_shards(path: str, names: Sequence[str] | None) -> list[str]:
    """The paths or URLs of a store's tars, in order.

    Args:
        path: A folder, a tar, or a pattern of tars: `{000..015}` and `{a,b}` in paths and URLs, `*`, `?` and `[...]` in
            paths. With names: the folder or URL that they are relative to.
        names: Names, paths, URLs or patterns; None takes what the path says.

    Raises:
        FileNotFoundError: There is nothing there.
        StoreError: A folder has no tars.
        ValueError: A pattern that means more shards than a store may have.
    """
    if names is not None:
        found = [shard for name in names for shard in _matching(_joined(path, name))]
    elif not is_url(path) and os.path.isdir(path):
        found = [os.path.join(path, name) for name in sorted(os.listdir(path), key=in_order) if _is_tar(name)]
        if not found:
            raise StoreError(f"{path} has no tars: no name in it ends with .tar; give their folder, or a pattern")
    else:
        found = list(_matching(path))
    if len(found) > _MOST_SHARDS:
        raise ValueError(f"{path} means {len(found)} tars, and a store may have {_MOST_SHARDS:,}")
    return [local_path(shard) if shard.lower().startswith(("file://", "local://")) else shard for shard in found]


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz")) and not name.startswith(".")


def _joined(path: str, name: str) -> str:
    if is_url(name) or os.path.isabs(name):
        return name
    return f"{path.rstrip('/')}/{name}" if is_url(path) else os.path.join(path, name)


def _matching(pattern: str) -> Iterator[str]:
    for path in [pattern] if os.path.lexists(pattern) else expanded(pattern):
        if is_url(path) or os.path.exists(path):
            yield path
        elif glob.has_magic(path) and (found := glob.glob(path)):
            yield from sorted(found, key=in_order)
        else:
            raise FileNotFoundError(f"there is no tar at {path}; give a folder, a tar, or a pattern that fits some")


def expanded(pattern: str) -> list[str]:
    """What braces in a pattern stand for, as in a shell.

    Raises:
        ValueError: More than a store may have.

    Example:
        >>> expanded("{train,val}-{08..10}.tar")  # doctest: +NORMALIZE_WHITESPACE
        ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    parts = _BRACES.split(pattern)
    choices: list[list[str]] = []
    count = 1
    for place, part in enumerate(parts):
        if place % 2 == 0:
            choices.append([part])
            continue
        if found := _RANGE.fullmatch(part):
            first, last = int(found[1]), int(found[2])
            count *= abs(last - first) + 1
            if count > _MOST_SHARDS:
                raise ValueError(f"{pattern} means {count:,} tars or more, and a store may have {_MOST_SHARDS:,}")
            width = len(found[1]) if found[1].startswith("0") else 0
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            choices.append([f"{number:0{width}d}" for number in numbers])
        elif "," in part:
            choices.append(part.split(","))
            count *= len(choices[-1])
        else:
            choices.append([f"{{{part}}}"])
    if count > _MOST_SHARDS:
        raise ValueError(f"{pattern} means {count:,} tars, and a store may have {_MOST_SHARDS:,}")
    return ["".join(chosen) for chosen in itertools.product(*choices)]
