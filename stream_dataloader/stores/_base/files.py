"""Files of a store, whose content is not trusted.

Patterns have braces, as in a shell, and wildcards. URLs allow only the wildcard `*`.

Guarantee: reading a file takes no more memory than its size, and an error names the file.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.listing import without_hidden
from stream_dataloader.streams._media.section import KnownFile, file_version
from stream_dataloader.streams.cache import FileCache, is_url, open_local
from stream_dataloader.streams.cache.remote import UnreachableError, final_error, text_of

__all__ = [
    "damage_named",
    "digest_of",
    "disk_bytes",
    "expanded",
    "hashed",
    "in_folder",
    "inside",
    "matching",
    "package",
    "plain",
    "plain_path",
    "read_json",
    "stamp_of",
    "sync_folder",
    "write_once",
    "write_synced",
]

_DIGESTED_BYTES = 1 << 16


def hashed(*parts: bytes | str) -> str:
    """Return a hash of several texts and bytes."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part)
    return found.hexdigest()


def package(name: str, user: str, extra: str = "") -> Any:
    """Import a package; an ImportError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        install = f"'stream-dataloader[{extra}]'" if extra else name
        raise ImportError(f"{user} needs {name}: pip install {install} ({error})") from error


def read_json(path: str, kind: type[Any], name: str = "") -> Any:
    """Return the content of a JSON file; a StoreError calls the file `name`."""
    with damage_named(name or path), open(path, "rb") as file:
        found = json.loads(file.read())
        if not isinstance(found, kind):
            raise TypeError(f"it holds a {type(found).__name__}, not a {kind.__name__}")
        return found


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """Turn errors that packages raise into StoreErrors with a name, except those of the disk and the network."""
    try:
        yield
    except (StoreError, ImportError, UnreachableError):
        raise
    except Exception as error:  # of packages, of codecs, of archives: any kind
        # A damaged archive can lead to seeks to impossible places: EINVAL.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.EINVAL):
            raise
        if isinstance(error, FileNotFoundError):
            raise StoreError(f"{error.filename or name} is missing: the store is unfinished or damaged") from None
        text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
        if name not in text:
            text = f"{name} cannot be read: {text or repr(error)}; it is cut off or damaged"
        raise StoreError(text) from error


def disk_bytes(path: str) -> int:
    """Return the bytes of a file, or of all files below a folder, some of which may disappear meanwhile."""
    total = 0
    for place, _, names in os.walk(path) if os.path.isdir(path) else [("", (), [path])]:
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def stamp_of(paths: Iterable[str]) -> str:
    """Return a hash that changes if one of these files is changed, replaced or removed."""
    found = []
    for path in paths:
        try:
            found.append(file_version(os.stat(path)))
        except OSError:
            found.append((0, 0, 0))
    return hashed(repr(found))


def digest_of(known: KnownFile) -> str:
    """Return a hash that identifies a file's content by its size, head and tail."""
    with known, open(known.path, "rb") as file:
        ends = f"{known.size} ".encode() + file.read(_DIGESTED_BYTES)
        file.seek(max(0, known.size - _DIGESTED_BYTES))
        ends += file.read(_DIGESTED_BYTES)
    return hashed(ends)


def plain(value: Any) -> Any:
    """Convert a value to one that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def write_once(path: str, content: Any) -> None:
    """Write a JSON file, unless another process has written it. It is complete, or does not exist."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), delete=False) as file:
        json.dump(content, file)
    try:
        os.link(file.name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(file.name)


def in_folder(folder: str, name: str) -> str:
    """Return the path or URL of a file in a folder. In chained URLs the first one is the folder."""
    if not is_url(folder):
        return os.path.join(folder, name)
    first, chain, rest = folder.partition("::")
    return f"{first.rstrip('/')}/{name}{chain}{rest}"


def inside(folder: str, name: Any, what: str) -> str:
    """Return the path of a file that `what` names; raise if it leads out of the folder."""
    parts = name.replace("\\", "/").split("/") if isinstance(name, str) and name else [".."]
    if ".." in parts or "\0" in name or "::" in name or os.path.isabs(name) or name[1:2] == ":":
        raise StoreError(f"{what} names a file {name!r}, which lies outside or is none")
    if any(part.startswith(".") and part != "." for part in parts):
        raise StoreError(f"{what} names a hidden file {name!r}, which is no data")
    return os.path.join(folder, *parts)


def write_synced(path: str, data: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: str) -> None:
    """Wait until the names in a folder, or a file, are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_FILES = 1_000_000


def plain_path(path: str | os.PathLike[str]) -> str:
    """Return the path of a URL `file://`; other paths and URLs are not changed."""
    path = os.fspath(path)
    return open_local(path).path if path.lower().startswith(("file://", "local://")) else path


def matching(pattern: str, cache: FileCache | None = None) -> Iterator[str]:
    """Yield the paths and URLs that match a pattern, in order."""
    for path in map(plain_path, [pattern] if os.path.lexists(pattern) else expanded(pattern)):
        if is_url(path) and "*" in path:
            yield from _on_server(path, cache or FileCache())
        elif is_url(path) or os.path.exists(path):
            yield path
        elif glob.has_magic(path) and (found := without_hidden(glob.glob(path), path)):
            yield from found
        else:
            raise FileNotFoundError(f"there is no file at {path}")


def _on_server(pattern: str, cache: FileCache) -> list[str]:
    core = package("fsspec.core", pattern, "remote")
    try:
        file_system, path = core.url_to_fs(pattern, **cache.storage_options)
        found = [file_system.unstrip_protocol(one) for one in without_hidden(file_system.glob(path), path)]
    except Exception as error:
        raise final_error(pattern, error) or OSError(f"{pattern} cannot be listed: {text_of(error)}") from error
    if not found:
        raise FileNotFoundError(f"there is no file at {pattern}")
    _, chain, rest = pattern.partition("::")
    return [f"{one.partition('::')[0]}{chain}{rest}" for one in found]


def expanded(pattern: str) -> list[str]:
    """Return the patterns that the braces in a pattern stand for.

    Example:
        >>> expanded("{train,val}-{08..10}.tar")  # doctest: +NORMALIZE_WHITESPACE
        ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    parts: list[Iterable[str]] = []
    count = 1
    for place, part in enumerate(_BRACES.split(pattern)):  # text, what is in braces, text, ...
        choices = part.split(",") if place % 2 and "," in part else [f"{{{part}}}" if place % 2 else part]
        count *= len(choices)
        parts.append(choices)
        if place % 2 and (found := _RANGE.fullmatch(part)):
            first, last = int(found[1]), int(found[2])
            step = 1 if first <= last else -1
            width = len(found[1]) if found[1].startswith("0") else 0
            count *= abs(last - first) + 1
            parts[place] = map(f"{{:0{width}d}}".format, range(first, last + step, step))
    if count > _MOST_FILES:
        raise ValueError(f"{pattern} means {count:,} files, but a store may have at most {_MOST_FILES:,}")
    return ["".join(chosen) for chosen in itertools.product(*parts)]
