r"""Files of tokens: their content, and the starts of documents.

::

    corpus.bin, corpus.idx    Megatron's pair: tokens, and their index
    train.bin                 a header of 256 int32, then tokens
    train.bin, part.npy       tokens alone

An index is little-endian::

    9 bytes    MMIDIDX\0\0
    u64        the version, 1
    u8         a code for the tokens' dtype
    u64, u64   number of sequences, and of bounds
    int32 ...  each sequence's length
    int64 ...  each sequence's first byte
    int64 ...  the bounds of documents: numbers of sequences

Source: NVIDIA/Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.

Guarantee: the claims of a header are compared with the file's size.
"""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named, digest_of, matching
from stream_dataloader.stores._base.leaves import LeafSpec, dtype_named
from stream_dataloader.stores.memmap.store import LeafFile
from stream_dataloader.streams._media.listing import entries_in
from stream_dataloader.streams._media.section import KnownFile, check_file
from stream_dataloader.streams.cache import FileCache, is_url, open_local

__all__ = ["MappedTokens", "Marker", "TokenFile", "find_files"]

_SCANNED_AT_ONCE = 1 << 22

#: Dtypes by magic number and version of llm.c's header, which modded-nanogpt also uses.
_HEADERS: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("uint16"),
    (20240801, 7): np.dtype("uint32"),
}
_HEADER_BYTES = 1024

_INDEX = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    6: np.dtype("float64"),
    7: np.dtype("float32"),  # float64 in files of RWKV and of older Megatron
    8: np.dtype("uint16"),
}


def find_files(path: str, cache: FileCache | None) -> list[str]:
    """Return the paths or URLs of a store's files. The path of an index stands for its file of tokens."""
    if is_url(path) or not os.path.isdir(path):
        found = map(os.path.splitext, matching(path, cache))
        return [root + (".bin" if end == ".idx" else end) for root, end in found]
    entries = entries_in(path)
    for end in (".bin", ".npy"):
        if tokens := [entry.path for entry in entries if entry.name.endswith(end)]:
            return tokens
    raise StoreError(f"no name in {path} ends with .bin or .npy")


class TokenFile:
    """Facts about a file that are known without reading tokens; `stored` is the dtype, if the file does not say it.

    `first` is the number of values before the tokens. `bounds` are the starts of documents, and the end.
    """

    def __init__(self, name: str, stored: np.dtype[Any] | None, cache: FileCache | None) -> None:
        self.name = name
        self._held = open_local(name, cache)  # open for as long as this object
        self.path = check_file(self._held.path)
        self.known = KnownFile.of(self.path, name=name)
        self.digest = digest_of(self.known)
        self.bounds: NDArray[np.int64] | None = None
        with open(self.path, "rb") as file:
            head = file.read(_HEADER_BYTES)
        start = head.ljust(12, b"\0")[:12]
        magic, version, claimed = struct.unpack("<3i", start)
        header, dtype = 0, stored
        if index := _index_of(name, cache):
            with damage_named(index):
                dtype = self._read_index(index, cache)
        elif (magic, version) in _HEADERS:
            header, dtype = _HEADER_BYTES, _HEADERS[magic, version]
        elif head.startswith(b"\x93NUMPY"):
            raise StoreError(f"{name} has NumPy's header; give format='npy'")
        if dtype is None:
            remedy = "give stored_dtype='uint16' (nanoGPT, OLMo) or another"
            raise StoreError(f"{name} does not say what it holds; {remedy}")
        if stored not in (None, dtype):
            raise StoreError(f"{name} holds {dtype}, not stored_dtype={stored}")
        self.dtype = dtype
        self.first = header // dtype.itemsize
        size = self.known.size - header
        self.count, rest = divmod(size, dtype.itemsize)
        if rest or (header and self.count != claimed):
            what = f"{claimed:,} of {dtype}" if header else str(dtype)
            raise StoreError(f"{name} is damaged: {size:,} bytes are not {what}")

    def _read_index(self, name: str, cache: FileCache | None) -> np.dtype[Any]:
        """Read the bounds of documents; return the dtype."""
        with open_local(name, cache) as local:
            known = KnownFile.of(local.path, name=name)
            self.digest += digest_of(known)
            with known, open(local.path, "rb") as file:
                content = file.read()
        magic, version, code, sequences, bounds = _INDEX.unpack_from(content)
        if (magic, version) != (_MAGIC, 1) or code not in _DTYPES:
            raise StoreError(f"{name} is no index: it begins with {content[:18]!r}")
        dtype = _DTYPES[code]
        sizes = 4 * sequences, 8 * sequences, 8 * bounds
        end = _INDEX.size + sum(sizes)
        if len(content) not in (end, end + sequences):  # with a mode for each sequence
            raise StoreError(f"{name} is damaged: {len(content):,} bytes of {end:,}")
        place = _INDEX.size
        lengths = np.frombuffer(content, "<i4", sequences, place)
        place += sizes[0]
        begins = np.frombuffer(content, "<i8", sequences, place)
        place += sizes[1]
        cuts = np.frombuffer(content, "<i8", bounds, place)
        ends: Any = np.cumsum(np.append(0, lengths), dtype=np.int64)
        total = int(ends[-1])
        if code == 7 and 8 * total == self.known.size:
            dtype = np.dtype("float64")
        if (lengths < 0).any() or (ends[:-1] * dtype.itemsize != begins).any():
            raise StoreError(f"{name} is damaged: sequences do not follow each other")
        if total * dtype.itemsize != self.known.size:
            text = f"has {self.known.size:,} bytes of {total:,} {dtype}"
            raise StoreError(f"{self.name} {text}, says its index")
        around = np.diff(cuts, prepend=0, append=sequences)
        if not bounds or around[0] or around[-1] or (around < 0).any():
            raise StoreError(f"{name} is damaged: documents do not follow each other")
        self.bounds = ends[cuts]
        return dtype


def _index_of(name: str, cache: FileCache | None) -> str | None:
    root, end = os.path.splitext(name)
    index = root + ".idx"
    if end != ".bin":
        return None
    if not is_url(name):
        return index if os.path.exists(index) else None
    try:
        open_local(index, cache).close()
    except FileNotFoundError:
        return None
    return index


class Marker(NamedTuple):
    """Token that separates documents, and whether it ends one (or begins one)."""

    token: int
    ends: bool


class MappedTokens(LeafFile):
    """Open file, and its `tokens`.

    The `marker` tells the starts of documents; without it, the index does.
    """

    def __init__(self, file: TokenFile, marker: Marker | None) -> None:
        spec = LeafSpec(dtype_named(str(file.dtype)), ())
        super().__init__(file.path, spec, file.first + file.count)
        file.known.check()  # the file may have been replaced
        self.tokens: NDArray[Any] = self.rows[file.first :]
        self._marker, self._bounds = marker, file.bounds

    def starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the starts of documents in tokens `[first, stop)`; the start at 0 may be left out."""
        if self._marker is not None:
            token, ends = self._marker
            begin = max(first, int(ends))
            found = self.tokens[begin - ends : stop - ends] == token
            places: NDArray[np.int64] = found.nonzero()[0] + begin
            return places
        if self._bounds is None:
            return np.zeros(0, np.int64)
        begin, end = self._bounds.searchsorted((first, stop)).tolist()
        return self._bounds[begin:end]

    def documents(self) -> NDArray[np.int64]:
        """Return the starts of documents, and the end. This reads all tokens."""
        count = len(self.tokens)
        places = range(1, count, _SCANNED_AT_ONCE)
        found = [self.starts(at, min(at + _SCANNED_AT_ONCE, count)) for at in places]
        return np.concatenate([[0], *found, [count]])

    def close(self) -> None:
        """Do nothing, because the map is closed when nothing refers to it."""
