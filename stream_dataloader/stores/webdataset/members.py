"""What is in a tar, and where: read once from the headers of its members, and kept in this library's cache.

Guarantee: a tar that was read is whole: each header's checksum is right, each member lies in the file, and the end mark
is there with nothing behind it. The index is that of the file as it is now, or it is made anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tarfile
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.streams.cache import kept

__all__ = ["TarIndex", "forget", "keep", "load", "scan"]

_KEPT = "tars"  # the folder in the cache
_TABLES = ("key_stops", "first", "offset", "size", "kind", "keys")
_BLOCK = 512
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}

#: A member's key and extension: the name up to the first dot behind the last slash, and what follows it. As the package
#: webdataset has it (1.0.2, `tariterators.base_plus_ext`): members without a dot belong to no sample.
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")


class TarIndex(NamedTuple):
    """The samples of a tar; `state` tells the file from what it was, `digest` is of all headers."""

    state: str
    digest: str
    extensions: tuple[str, ...]
    key_stops: NDArray[np.int64]  # where each sample's key ends in `keys`
    first: NDArray[np.int64]  # each sample's first member, and the number of members
    offset: NDArray[np.int64]  # of each member
    size: NDArray[np.int64]
    kind: NDArray[np.int64]  # which of the extensions
    keys: bytes

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.key_stops)

    def key(self, sample: int) -> str:
        """A sample's key."""
        begin = int(self.key_stops[sample - 1]) if sample else 0
        return self.keys[begin : int(self.key_stops[sample])].decode("utf-8", "surrogateescape")

    def all_keys(self) -> list[str]:
        """All samples' keys."""
        if not self.keys.isascii():
            return list(map(self.key, range(self.samples)))
        text = self.keys.decode("ascii")
        return [text[begin:stop] for begin, stop in itertools.pairwise([0, *self.key_stops.tolist()])]


class _Bounded:
    """A file for tarfile that reads no more than there is: tarfile takes room for what a header claims."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._file.tell())
        if count < 0 or count > left + _BLOCK:
            raise tarfile.ReadError(f"a header claims {count:,} bytes of names, and {left:,} follow")
        return self._file.read(count)


def scan(file: BinaryIO, name: str, state: str) -> TarIndex:
    """Read the headers of a tar."""
    total = os.fstat(file.fileno()).st_size
    head = file.read(8)
    for magic, tool in _COMPRESSED.items():
        if head.startswith(magic):
            raise StoreError(
                f"{name} is compressed, and cannot be read from any place on; unpack it once ({tool}), images and the "
                "like are compressed already"
            )
    file.seek(0)
    samples = _Samples(name)
    try:
        with tarfile.open(fileobj=_Bounded(file, total), mode="r:") as tar:  # type: ignore[call-overload]
            place = -1
            while (info := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep them all
                if info.offset_data <= place or info.size < 0 or info.offset_data + info.size > total:
                    raise StoreError(
                        f"{name}: {info.name!r} has {info.size:,} bytes from byte {info.offset_data:,} on, and the tar "
                        f"has {total:,}: it is cut off or damaged; write it anew"
                    )
                place = info.offset_data
                samples.add(info)
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError, IndexError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{name} is no whole tar ({error}): it is cut off or damaged; write it anew") from None
    _check_end(file, end, name)
    return samples.index(state)


def _check_end(file: BinaryIO, end: int, name: str) -> None:
    """Tarfile takes a header that is damaged, and the end of the file, for the end of the tar."""
    file.seek(end)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK or block.strip(b"\0"):
        raise StoreError(f"{name} has no end mark or header at byte {end:,}: it is cut off or damaged; write it anew")
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise StoreError(
                f"{name} has data behind its end mark at byte {end:,}: it is damaged, or tars were put end to end"
            )


class _Samples:
    """Groups members to samples."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hash = hashlib.blake2b(digest_size=16)
        self._kinds: dict[str, int] = {}
        self._members: list[tuple[int, int, int]] = []
        self._first: list[int] = []
        self._keys: dict[bytes, None] = {}
        self._current: bytes | None = None
        self._in_sample: set[int] = set()

    def add(self, info: tarfile.TarInfo) -> None:
        """Take in a member."""
        if info.isdir():
            return
        name = info.name
        if not info.isreg() or info.issparse():
            what = "sparse" if info.isreg() else "a link" if info.islnk() or info.issym() else "a device or the like"
            raise StoreError(f"{self._name}: {name!r} is {what}; a tar of samples holds plain files, write it anew")
        if name.startswith("/") or ".." in name.split("/"):
            raise StoreError(f"{self._name}: {name!r} is a path that leads out of the tar; it is refused")
        found = _NAME.fullmatch(name)
        if found is None or _META.match(name):
            return
        key, extension = found[1].encode("utf-8", "surrogateescape"), found[2].lower()
        kind = self._kinds.setdefault(extension, len(self._kinds))
        if key != self._current:
            if key in self._keys:
                raise StoreError(
                    f"{self._name}: the members of sample {found[1]!r} are not one behind the other, {name!r} comes "
                    "after those of others; write the tar anew, sorted by name (tar --sort=name)"
                )
            self._keys[key] = None
            self._first.append(len(self._members))
            self._current = key
            self._in_sample = set()
        if kind in self._in_sample:
            raise StoreError(f"{self._name} has two members {name!r}; write it anew, with one of them")
        self._in_sample.add(kind)
        self._members.append((info.offset_data, info.size, kind))
        self._hash.update(f"{info.offset_data} {info.size} {info.mtime} {info.chksum} ".encode() + key + b"\0")
        self._hash.update(extension.encode("utf-8", "surrogateescape"))

    def index(self, state: str) -> TarIndex:
        """What was taken in."""
        offset, size, kind = np.array(self._members, np.int64).reshape(-1, 3).T
        return TarIndex(
            state=state,
            digest=self._hash.hexdigest(),
            extensions=tuple(self._kinds),
            key_stops=np.cumsum([len(key) for key in self._keys], dtype=np.int64),
            first=np.array([*self._first, len(self._members)], np.int64),
            offset=np.ascontiguousarray(offset),
            size=np.ascontiguousarray(size),
            kind=np.ascontiguousarray(kind),
            keys=b"".join(self._keys),
        )


def keep(path: str, index: TarIndex) -> None:
    """Keep the index of a tar, under its path or URL."""
    texts = json.dumps([index.state, index.digest, index.extensions]).encode()
    numbers = index._asdict() | {"keys": np.frombuffer(index.keys, np.uint8)}
    tables = {name: numbers[name] for name in _TABLES}
    kept.keep(_KEPT, path, {"texts": np.frombuffer(texts, np.uint8), **tables})


def load(path: str, state: str | None) -> TarIndex | None:
    """The index of a tar that was kept; None if there is none, or it is of another state than wanted (None: any)."""
    found = kept.load(_KEPT, path)
    if found is None or found.keys() != {"texts", *_TABLES}:
        return None
    known, digest, extensions = json.loads(found.pop("texts").tobytes())
    if state not in (None, known):
        return None
    tables: Any = found | {"keys": found["keys"].tobytes()}
    return TarIndex(state=known, digest=digest, extensions=tuple(extensions), **tables)


def forget(path: str) -> None:
    """Have the index of a tar made anew."""
    kept.keep(_KEPT, path, {})
