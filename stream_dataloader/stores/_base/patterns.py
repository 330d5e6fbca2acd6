"""Patterns that stand for several files of a store: braces, as in a shell, in paths and URLs, and wildcards in paths.

Guarantee: a pattern that means more files than a store may have is refused before they are listed.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator

from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams.cache.file_cache import is_url, local_path

__all__ = ["expanded", "matching"]

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_FILES = 1_000_000


def matching(pattern: str) -> Iterator[str]:
    """The paths and URLs that a pattern stands for, in the order of braces, and of names with numbers as numbers.

    Raises:
        FileNotFoundError: A path of them is not there.
        ValueError: They are more than a store may have.
    """
    for path in [pattern] if os.path.lexists(pattern) else expanded(pattern):
        if path.lower().startswith(("file://", "local://")):
            yield local_path(path)
        elif is_url(path) or os.path.exists(path):
            yield path
        elif glob.has_magic(path) and (found := glob.glob(path)):
            yield from sorted(found, key=natural_order)
        else:
            raise FileNotFoundError(f"there is no file at {path}; give a folder, a file, or a pattern that fits some")


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
