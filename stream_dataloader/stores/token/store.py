"""Reads tokens that were made beforehand.

Guarantee: tokens are copied once, from a map of the file to the batch.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.token.files import MappedTokens, TokenFile, find_files
from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["TokenStore"]

_CHECKED_AT_ONCE = 1 << 20


class TokenStore(Store):
    """Files of tokens; an item is a token.

    These are Megatron's `.bin` with its `.idx`, files with the header of llm.c
    and modded-nanogpt, and tokens alone, as of nanoGPT and OLMo. A file is a
    stream: the dataset's `sections` cut large ones.

    Args:
        path: A file, a folder, a pattern `"train-*.bin"`, or a URL. Files are
            read in the order of their names.
        stream: What a stream is: a `"file"`, or a `"document"` of one.
        dtype: Of items, such as `"int64"`, which `torch.nn.Embedding` takes.
            None: as in the file.
        stored_dtype: Of tokens in files that do not say it, such as `"uint16"`.
        cache: Where files from URLs are kept; None is the one of all streams.
    """

    format: ClassVar[str] = "token"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: Literal["file", "document"] = "file",
        dtype: Any = None,
        stored_dtype: Any = None,
        cache: FileCache | None = None,
    ) -> None:
        if stream not in ("file", "document"):
            raise ValueError(f"stream is {stream!r}; use 'file' or 'document'")
        self._stored = _dtype("stored_dtype", stored_dtype)
        self._dtype = _dtype("dtype", dtype)
        super().__init__(
            path,
            stream=stream,
            dtype=self._dtype and str(self._dtype),
            stored_dtype=self._stored and str(self._stored),
            cache=cache,
        )
        self._by_document = stream == "document"
        self._cache = cache
        _ = self.index

    def _read_index(self) -> _Index:
        names = find_files(self.path, self._cache)
        files = [TokenFile(name, self._stored, self._cache) for name in names]
        for file in files:
            wanted = self._dtype or file.dtype
            if not np.can_cast(file.dtype, wanted):
                what = f"the {file.dtype} of {file.name}"
                raise ValueError(f"dtype is {wanted}, which does not hold {what}")
        return _Index(files, by_document=self._by_document)

    def _open_steps(self, number: int) -> TokenSteps:
        index: _Index = self.index
        place, start, stop = index.place(number)
        dtype = self._dtype or index.files[place].dtype
        return TokenSteps(index.opened.lease(place), dtype, start, stop)

    def key(self, number: int) -> str:
        index: _Index = self.index
        place, _, _ = index.place(self._check_number(number))
        folder = os.path.dirname(self.path)
        file = os.path.relpath(index.files[place].name, folder)
        within = number - index.firsts[place]
        return f"{file}:{within}" if self._by_document else file

    def metadata(self, number: int) -> Mapping[str, Any]:
        index: _Index = self.index
        place, start, _ = index.place(self._check_number(number))
        return {"file": index.files[place].name, "token": start}

    def _metadata(self) -> Mapping[str, Any]:
        return {"files": len(self.index.files)}

    def _disk_bytes(self) -> int | None:
        files: list[TokenFile] = self.index.files
        return sum(file.known.size for file in files)

    def check_stream(self, number: int) -> None:
        steps = self._open_steps(number)
        for start in range(0, len(steps), _CHECKED_AT_ONCE):
            count = min(_CHECKED_AT_ONCE, len(steps) - start)
            steps.read(start, np.empty(count, np.float64))
        steps.close()


class _Index:
    """See `Store._read_index`."""

    def __init__(self, files: list[TokenFile], *, by_document: bool) -> None:
        self.files = files
        self._bounds: list[NDArray[np.int64]] = []
        for file in files:
            bounds = file.bounds if by_document else np.array([0, file.count])
            if bounds is None:
                raise StoreError(f"{file.name} has no index; leave out stream=")
            self._bounds.append(bounds)
        counts = [len(bounds) - 1 for bounds in self._bounds]
        self.firsts = [0, *accumulate(counts)]
        self.lengths = np.concatenate(list(map(np.diff, self._bounds)))
        told = [(file.digest, str(file.dtype)) for file in files]
        content = repr((by_document, told))
        digest = hashlib.blake2b(content.encode(), digest_size=16)
        self.fingerprint = digest.hexdigest()
        self.opened = Handles(self._open)

    def _open(self, place: int) -> MappedTokens:
        return MappedTokens(self.files[place])

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, number: int) -> tuple[int, int, int]:
        """The number of a stream's file, and its tokens `[start, stop)`."""
        place = bisect_right(self.firsts, number) - 1
        first = number - self.firsts[place]
        start, stop = self._bounds[place][first : first + 2].tolist()
        return place, start, stop


class TokenSteps:
    """Tokens `[first, stop)` of a file; see `Steps`."""

    def __init__(
        self,
        lease: Lease[int, MappedTokens],
        dtype: np.dtype[Any],
        first: int,
        stop: int,
    ) -> None:
        self._lease, self._file = lease, lease.handle
        self._dtype, self._first, self._stop = dtype, first, stop

    def __len__(self) -> int:
        return self._stop - self._first

    def item(self, index: int) -> Any:
        room = np.empty(1, self._dtype)
        self.read(index, room)
        return room[0]

    def read(self, start: int, out: Any) -> None:
        begin = self._first + start
        self._file.check_size()
        out[...] = self._file.tokens[begin : begin + len(out)]
        self._file.check()

    def close(self) -> None:
        self._lease.close()


def _dtype(option: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    found: np.dtype[Any] = np.dtype(value)
    if found.kind not in "iuf":
        raise ValueError(f"{option} is {value!r}; give 'uint16', 'int64', ...")
    return found
