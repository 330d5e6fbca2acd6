"""Members of a tar and their places, read once from its headers and saved in the cache.

Guarantee: headers match their checksums, members lie within the file, and no data follow the end.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.streams._media.listing import is_hidden
from stream_dataloader.streams.cache import keep_tables, kept_tables

__all__ = ["TarIndex", "forget", "keep", "load", "scan"]

_KEPT = "tars"  # the folder in the cache
_BLOCK = 512
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd

_META = re.compile(r"__[^/]*__($|/)")

#: Linux's PATH_MAX, and the largest size of extended headers (owners, times, attributes).
_LONGEST_NAME, _LARGEST_HEADER_BYTES = 4096, 1 << 20


class TarIndex(NamedTuple):
    """The samples of a tar."""

    state: str  # identifies the state of the file
    digest: str  # hash of all headers
    extensions: tuple[str, ...]
    key_stops: NDArray[np.int64]  # end of each sample's key in `keys`
    first: NDArray[np.int64]  # each sample's first member, and the number of members
    offset: NDArray[np.int64]  # of each member
    size: NDArray[np.int64]
    kind: NDArray[np.int64]  # index of the extension
    keys: NDArray[np.uint8]

    @property
    def samples(self) -> int:
        return len(self.key_stops)

    def key(self, sample: int) -> str:
        begin = int(self.key_stops[sample - 1]) if sample else 0
        key = self.keys[begin : int(self.key_stops[sample])].tobytes()
        return key.decode("utf-8", "surrogateescape")

    def all_keys(self) -> list[str]:
        keys = self.keys.tobytes()
        borders = itertools.pairwise([0, *self.key_stops.tolist()])
        return [keys[begin:stop].decode("utf-8", "surrogateescape") for begin, stop in borders]


class _Bounded:
    """File that raises if more is read than it holds, or than a header may have."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._file.tell())
        if count < 0 or count > left + _BLOCK:
            raise tarfile.ReadError(f"a header claims {count:,} bytes of names, and {left:,} follow")
        if count > _LARGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has {count:,} bytes of names, and may have {_LARGEST_HEADER_BYTES:,}")
        return self._file.read(count)


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    total = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=_Bounded(file, total), mode="r:") as tar:  # type: ignore[call-overload]
        place = -1
        while (info := tar.next()) is not None:
            tar.members.clear()  # tarfile would keep all members in memory
            begin, size = info.offset_data, info.size
            if begin <= place or size < 0 or begin + size > total:
                raise ValueError(f"{info.name!r} has {size:,} bytes at {begin:,} of {total:,}")
            place = begin
            yield info
        end = tar.offset
    # For tarfile, a damaged header or the end of the file is the end of the tar.
    file.seek(end)
    rest = block = file.read(_BLOCK)
    while rest and not rest.strip(b"\0"):
        rest = file.read(1 << 20)
    if rest or len(block) < _BLOCK:
        raise ValueError(f"there is no end mark at byte {end:,}, or data behind it")


def scan(file: BinaryIO, name: str, state: str) -> TarIndex:
    """Read the headers of a tar, and group its members into samples."""
    if file.read(8).startswith(_COMPRESSED):
        raise StoreError(f"{name} is compressed; unpack it once")
    file.seek(0)
    digest = hashlib.blake2b(digest_size=16)
    kinds: dict[str, int] = {}
    members: list[tuple[int, int, int]] = []
    first: dict[bytes, int] = {}  # the first member of each sample, by its key
    key, in_sample = b"", set[int]()
    with damage_named(name):
        for info in _members(file):
            if (found := _parts(info, name)) is None:
                continue
            last, (key, extension) = key, found
            kind = kinds.setdefault(extension, len(kinds))
            if key not in first:
                first[key], in_sample = len(members), set()
            elif key != last:
                what = f"{name}: {info.name!r} lies apart from its sample"
                raise StoreError(f"{what}; sort by name (tar --sort=name)")
            if kind in in_sample:
                raise StoreError(f"{name} has two members {info.name!r}; write it again")
            in_sample.add(kind)
            members.append((info.offset_data, info.size, kind))
            numbers = f"{info.offset_data} {info.size} {info.mtime} {info.chksum} "
            digest.update(numbers.encode() + key + b"\0")
            digest.update(extension.encode("utf-8", "surrogateescape"))
    offset, size, kind_of = np.ascontiguousarray(np.array(members, np.int64).reshape(-1, 3).T)
    return TarIndex(
        state=state,
        digest=digest.hexdigest(),
        extensions=tuple(kinds),
        key_stops=np.cumsum([len(key) for key in first], dtype=np.int64),
        first=np.array([*first.values(), len(members)], np.int64),
        offset=offset,
        size=size,
        kind=kind_of,
        keys=np.frombuffer(b"".join(first), np.uint8),
    )


def _parts(info: tarfile.TarInfo, tar: str) -> tuple[bytes, str] | None:
    name = info.name
    if len(name) > _LONGEST_NAME:
        raise StoreError(f"{tar}: a name has {len(name):,} characters, and may have {_LONGEST_NAME:,}")
    folder, slash, last = name.rpartition("/")
    above = _folder(folder + slash)
    if info.isdir() or above.is_hidden or is_hidden(last):
        return None
    if not info.isreg() or info.issparse() or above.is_outside or last == "..":
        raise StoreError(f"{tar}: {name!r} is no plain file inside of the tar; write it again")
    # Key and extension as of webdataset 1.0.2 (`tariterators.base_plus_ext`), whose expression takes quadratic time:
    # r"((?:.*/)?[^.]+)\.([^/]*)".
    stem, dot, extension = last.partition(".")
    if not dot or above.is_meta or (not slash and _META.match(name)):
        return None
    return f"{folder}{slash}{stem}".encode("utf-8", "surrogateescape"), extension.lower()


class _Folder(NamedTuple):
    """Facts about the name of a folder in a tar, which many members share."""

    is_hidden: bool
    is_outside: bool
    is_meta: bool


@functools.lru_cache(256)
def _folder(name: str) -> _Folder:
    is_outside = name.startswith("/") or ".." in name.split("/")
    return _Folder(is_hidden(name), is_outside, _META.match(name) is not None)


def keep(path: str, index: TarIndex) -> None:
    """Save the index of a tar under its path or URL."""
    state, digest, extensions, *_ = index
    texts = json.dumps([state, digest, extensions]).encode()
    tables = dict(itertools.islice(index._asdict().items(), 3, None))
    keep_tables(_KEPT, path, {"texts": np.frombuffer(texts, np.uint8), **tables})


def load(path: str, state: str | None) -> TarIndex | None:
    """Return the saved index of a state, or of any state if it is None; None if there is no such index."""
    if not (tables := kept_tables(_KEPT, path)):
        return None
    known, digest, extensions = json.loads(tables.pop("texts").tobytes())
    if state not in (None, known):
        return None
    numbers: dict[str, Any] = tables
    return TarIndex(state=known, digest=digest, extensions=tuple(extensions), **numbers)


def forget(path: str) -> None:
    """Delete the saved index of a tar, so that it is made again."""
    keep_tables(_KEPT, path, {})
