"""The files of a store, which may hold anything: found by patterns, and small ones read with a limit.

Patterns have braces, as in a shell, and wildcards; of those, URLs have `*` alone: `?` begins a query.

Guarantee: whatever a file holds, reading it takes no more memory than the file is long, and ends in an error that names
the file, or in what was asked for. A pattern that means more files than a store may have is refused.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams.cache.file_cache import FileCache, is_url, local_path
from stream_dataloader.streams.cache.remote import final_error, text_of

__all__ = [
    "damage_named",
    "expanded",
    "inside",
    "matching",
    "plain_path",
    "read_json",
    "stamp_of",
    "sync_folder",
    "write_once",
]


_LARGEST_JSON_BYTES = 1 << 30


def read_json(path: str, kind: type[Any] | None = None, most_bytes: int = _LARGEST_JSON_BYTES) -> Any:
    """What a JSON file holds.

    Args:
        path: The file.
        kind: What it has to hold: dict or list. None: anything.
        most_bytes: A longer file is an error.

    Raises:
        StoreError: It is missing, too long, no JSON, or holds something else.
    """
    try:
        with open(path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                raise StoreError(f"{path} has {size:,} bytes, more than the {most_bytes:,} that it may have")
            found = json.loads(file.read())
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the store is unfinished or damaged; write it anew") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} is no valid JSON ({error}): the store is damaged; write it anew") from None
    if kind is not None and not isinstance(found, kind):
        raise StoreError(f"{path} holds a {type(found).__name__} instead of a {kind.__name__}; write the store anew")
    return found


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """Have what a package raises about damage be a `StoreError` with a file's or stream's name.

    Errors of the disk stay what they are. One that has the name already keeps its words.
    """
    try:
        yield
    except (StoreError, ImportError):
        raise
    except Exception as error:  # of packages, of codecs, of archives: any kind
        # A damaged archive has places sought that cannot be.
        if isinstance(error, OSError) and error.errno not in (
            None,
            errno.ENOENT,
            errno.EINVAL,
        ):
            raise
        if isinstance(error, FileNotFoundError) and error.errno is not None:
            raise StoreError(f"{error.filename or name} is missing: the store is unfinished or damaged") from None
        text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
        if name not in text:
            text = f"{name} cannot be read: {text or repr(error)}; it is cut off or damaged, write it anew"
        raise StoreError(text) from error


def stamp_of(paths: Iterable[str]) -> str:
    """What tells files from what they were: sizes and times of change; of one that is not there, that it is not."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def write_once(path: str, content: Any) -> None:
    """Write a JSON file, unless another process has: it is whole, or not there."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), delete=False) as file:
        json.dump(content, file)
    try:
        os.link(file.name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(file.name)


def inside(folder: str, name: Any, what: str) -> str:
    """The path of a file that a store names, which has to lie in the store.

    Args:
        folder: The store's.
        name: As the store says.
        what: Who says so, for the error.

    Raises:
        StoreError: The name is none, absolute, or leads out of the folder by `..`.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise StoreError(f"{what} names a file {name!r}, which is no name; the store is damaged")
    parts = name.replace("\\", "/").split("/")
    if os.path.isabs(name) or ".." in parts or (len(name) > 1 and name[1] == ":"):
        raise StoreError(f"{what} names a file {name!r}, which lies outside of the store; it is refused")
    return os.path.join(folder, *parts)


def sync_folder(folder: str) -> None:
    """Have the disk hold the names of a folder's files, or a file."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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
