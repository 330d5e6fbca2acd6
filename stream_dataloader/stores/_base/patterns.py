"""Patterns that stand for several files of a store, in paths and URLs: braces, as in a shell, and wildcards.

Of wildcards, URLs have `*` alone: `?` begins a query.

Guarantee: a pattern that means more files than a store may have is refused before they are listed.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator

from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams.cache.file_cache import FileCache, is_url, local_path
from stream_dataloader.streams.cache.remote import final_error, text_of

__all__ = ["expanded", "matching", "plain_path"]

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_FILES = 1_000_000


def plain_path(path: str | os.PathLike[str]) -> str:
    """The path of a URL `file://`; any other path or URL as it is."""
    path = os.fspath(path)
    return local_path(path) if path.lower().startswith(("file://", "local://")) else path


def matching(pattern: str, cache: FileCache | None = None) -> Iterator[str]:
    """The paths and URLs that a pattern stands for, in the order of braces, and of names with numbers as numbers.

    Args:
        pattern: See above.
        cache: How servers are asked; see `open_local`.

    Raises:
        FileNotFoundError: A path of them is not there.
        ValueError: They are more than a store may have.
    """
    for path in map(plain_path, [pattern] if os.path.lexists(pattern) else expanded(pattern)):
        if is_url(path) and "*" in path:
            yield from _on_server(path, FileCache() if cache is None else cache)
        elif is_url(path) or os.path.exists(path):
            yield path
        elif glob.has_magic(path) and (found := glob.glob(path)):
            yield from sorted(found, key=natural_order)
        else:
            raise FileNotFoundError(f"there is no file at {path}; give a folder, a file, or a pattern that fits some")


def _on_server(pattern: str, cache: FileCache) -> list[str]:
    """The URLs of the files on a server that fit a pattern; of chained URLs, the first has it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"listing {pattern} needs fsspec: pip install 'stream-dataloader[fsspec]'") from error
    try:
        file_system, path = url_to_fs(pattern, **cache.storage_options)
        found = [file_system.unstrip_protocol(one) for one in file_system.glob(path)]
    except Exception as error:
        raise final_error(pattern, error) or OSError(f"{pattern} cannot be listed: {text_of(error)}") from error
    if not found:
        raise FileNotFoundError(f"there is no file at {pattern}; give a URL, or a pattern that fits some")
    _, chain, rest = pattern.partition("::")
    return [f"{one.partition('::')[0]}{chain}{rest}" for one in sorted(found, key=natural_order)]


def expanded(pattern: str) -> list[str]:
    """What braces in a pattern stand for.

    Raises:
        ValueError: More than a store may have.

    Example:
        >>> expanded("{train,val}-{08..10}.tar")  # doctest: +NORMALIZE_WHITESPACE
        ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    choices: list[list[str]] = []
    count = 1
    for place, part in enumerate(_BRACES.split(pattern)):
        if place % 2 == 0:
            choices.append([part])
            continue
        if found := _RANGE.fullmatch(part):
            first, last = int(found[1]), int(found[2])
            count *= abs(last - first) + 1
            _check_count(pattern, count)
            width = len(found[1]) if found[1].startswith("0") else 0
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            choices.append([f"{number:0{width}d}" for number in numbers])
        else:
            choices.append(part.split(",") if "," in part else [f"{{{part}}}"])
            count *= len(choices[-1])
    _check_count(pattern, count)
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _check_count(pattern: str, count: int) -> None:
    if count > _MOST_FILES:
        raise ValueError(f"{pattern} means {count:,} files, and a store may have {_MOST_FILES:,}")
