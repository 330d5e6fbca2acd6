"""Small files that may hold anything: read with a limit, checked before anything is allocated for what they say.

Guarantee: whatever a file holds, reading it takes no more memory than the file is long, and ends in an error that names
the file, or in what was asked for.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from stream_dataloader.errors import StoreError

__all__ = ["damage_named", "inside", "read_json", "stamp_of", "sync_folder", "write_once"]

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
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.EINVAL):
            raise
        text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
        if name not in text:
            text = f"{name} cannot be read: {text or repr(error)}; it is damaged or cut off, write it anew"
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
