"""Reading of files of tokens.

Guarantee: tokens are copied once, from a map of the file to the batch. A token
has the same target wherever streams and sections are cut.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import hashed
from stream_dataloader.stores._base.formats import given_options
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.stream import StoreStream
from stream_dataloader.stores.token.files import MappedTokens, Marker, TokenFile, find_files
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams._media.targets import (
    IGNORE_INDEX,
    TARGET_DTYPE,
    check_ignore_index,
    put_targets,
)
from stream_dataloader.streams.cache import FileCache
from stream_dataloader.streams.cache.gate import Files

__all__ = ["TokenStore"]

_CHECKED_AT_ONCE = 1 << 20


class TokenStream(StoreStream):
    """Stream of tokens with marked starts of documents; see `protocols.MarksStarts`."""

    def starts_within(self, start: int, stop: int) -> Iterable[int]:
        assert isinstance(self._steps, TokenSteps)
        return self._steps.starts(start, stop, self._first)


class TokenStore(Store):
    """Files of tokens; an item is a token.

    Supported are Megatron's `.bin` with its `.idx`, files with the header of llm.c
    and modded-nanogpt, and tokens alone, as in nanoGPT and OLMo. A file is a
    stream, which the dataset's `sections` can cut. It marks the starts of documents;
    see `protocols.MarksStarts`.

    Args:
        path: A file, a folder, a pattern `"train-*.bin"`, or a URL. Files are
            read in the order of their names.
        stream: Kind of stream: a `"file"`, or a `"document"` of a file.
        eos_token: Token that ends a document. None: documents are those of the index.
        bos_token: Token that begins a document, in place of `eos_token`.
        targets: Items are `{"input": token, "target": next token}`. Targets are
            int64.
        ignore_index: Target at the end of a document or a file; give the loss the same number.
        dtype: Dtype of tokens in items, such as `"int64"`, which `torch.nn.Embedding`
            takes. None: the dtype of the file.
        stored_dtype: Dtype of tokens in files that do not say it, such as `"uint16"`.
        cache: Cache for files from URLs; None is the cache that all streams share.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
    """

    format: ClassVar[str] = "token"
    open_early: ClassVar[bool] = False  # opening is fast: a stream is a view of an open file

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: Literal["file", "document"] = "file",
        eos_token: int | None = None,
        bos_token: int | None = None,
        targets: bool = False,
        ignore_index: int = IGNORE_INDEX,
        dtype: Any = None,
        stored_dtype: Any = None,
        cache: FileCache | None = None,
        files: Files = "inside",
    ) -> None:
        if stream not in ("file", "document"):
            raise ValueError(f"stream is {stream!r}; use 'file' or 'document'")
        self._stored = _dtype("stored_dtype", stored_dtype)
        self._dtype = _dtype("dtype", dtype)
        self._marker = _marker(eos_token, bos_token)
        ignore_index = check_ignore_index(ignore_index, targets=targets, tokens=self._known_tokens())
        dtype, stored_dtype = self._dtype and str(self._dtype), self._stored and str(self._stored)
        super().__init__(path, **given_options(locals()))
        self._by_document = stream == "document"
        self._targets, self._ignore_index, self._cache = targets, ignore_index, cache
        _ = self.index

    def _known_tokens(self) -> tuple[int, ...]:
        """Tokens that the files are known to have."""
        return () if self._marker is None else (self._marker.token,)

    def _read_index(self) -> _Index:
        names = find_files(self.path, self._cache)
        files = [TokenFile(name, self._stored, self._cache) for name in names]
        for file in files:
            self._check(file)
        ignored = self._ignore_index if self._targets else None
        return _Index(files, self._marker, ignored, by_document=self._by_document)

    def _check(self, file: TokenFile) -> None:
        what = f"the {file.dtype} of {file.name}"
        wanted = self._dtype or file.dtype
        are_tokens = file.dtype.kind != "f"
        if not np.can_cast(file.dtype, wanted) and not (are_tokens and wanted == np.int64):
            raise ValueError(f"dtype is {wanted}, which does not hold {what}")
        if self._targets and not are_tokens:
            raise ValueError(f"targets=True, and {what} are no tokens")
        token = 0 if self._marker is None else self._marker.token
        if are_tokens and token > np.iinfo(file.dtype).max:
            raise ValueError(f"{token} cannot be among {what}")

    def _open_steps(self, number: int) -> TokenSteps:
        index: _Index = self.index
        place, start, stop = index.place(number)
        dtypes = {"input": self._dtype or index.files[place].dtype}
        if self._targets:
            dtypes["target"] = TARGET_DTYPE
        marks = self._marker is not None or index.files[place].bounds is not None
        marks = marks and not self._by_document
        return TokenSteps(index.opened.lease(place), dtypes, start, stop, marks, self._ignore_index)

    def _stream_of(self, steps: Any, first: int, start: int, stop: int) -> StoreStream:
        kind = TokenStream if steps.marks else StoreStream
        return kind(steps, first, start, stop)

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
            steps.read(start, steps.room(min(_CHECKED_AT_ONCE, len(steps) - start)))
        steps.close()


class _Index:
    """See `Store._read_index`."""

    def __init__(
        self, files: list[TokenFile], marker: Marker | None, ignored: int | None, *, by_document: bool
    ) -> None:
        self.files, self._marker = files, marker
        self.opened = Handles(functools.partial(_mapped, files, marker))  # no method, which would keep this in a cycle
        self._bounds = [np.array([0, file.count]) for file in files]
        if by_document:
            self._bounds = list(map(self._documents, range(len(files))))
        counts = [len(bounds) - 1 for bounds in self._bounds]
        self.firsts = [0, *accumulate(counts)]
        self.lengths = np.concatenate(list(map(np.diff, self._bounds)))
        told = [(file.digest, str(file.dtype)) for file in files]
        self.fingerprint = hashed(repr((by_document, marker, ignored, told)))

    def _documents(self, place: int) -> NDArray[np.int64]:
        file = self.files[place]
        if self._marker is not None:
            return self.opened.lease(place).handle.documents()
        if file.bounds is None:
            raise StoreError(f"{file.name} has no index; give eos_token= or bos_token=")
        return file.bounds

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, number: int) -> tuple[int, int, int]:
        place = bisect_right(self.firsts, number) - 1
        first = number - self.firsts[place]
        start, stop = self._bounds[place][first : first + 2].tolist()
        return place, start, stop


def _mapped(files: list[TokenFile], marker: Marker | None, place: int) -> MappedTokens:
    return MappedTokens(files[place], marker)


class TokenSteps:
    """Steps that are tokens `[first, stop)` of a file, see `Steps`; with `marks`, starts of documents are marked."""

    def __init__(
        self,
        lease: Lease[int, MappedTokens],
        dtypes: Mapping[str, np.dtype[Any]],
        first: int,
        stop: int,
        marks: bool,
        ignore_index: int,
    ) -> None:
        self._lease, self._file, self._dtypes = lease, lease.handle, dtypes
        self.alike = tuple(dtypes.items())
        self._first, self._stop, self.marks = first, stop, marks
        self._ignore_index = ignore_index
        self._found: tuple[int, int, list[int]] = 0, 0, []  # tokens read last: first, stop, starts among them

    def __len__(self) -> int:
        return self._stop - self._first

    def room(self, count: int) -> Any:
        room = {name: np.empty(count, dtype) for name, dtype in self._dtypes.items()}
        return room if "target" in room else room["input"]

    def item(self, index: int) -> Any:
        room = self.room(1)
        self.read(index, room)
        if "target" in self._dtypes:
            return {name: found[0] for name, found in room.items()}
        return room[0]

    def read(self, start: int, out: Any) -> None:
        file, has_targets = self._file, "target" in self._dtypes
        file.check_size()
        room = out["input"] if has_targets else out
        first = self._first + start
        stop = first + len(room)
        room[...] = file.tokens[first:stop]
        if has_targets:
            target, after = out["target"], file.tokens[first + 1 : min(stop + 1, self._stop)]
            put_targets(target, after, self._ignore_index)
            if self.marks:  # they tell the starts of these steps, too, which are asked for next
                found = file.starts(first, stop + 1).tolist()
                self._found = first, stop, found
                for begin in found:
                    if begin > first:
                        target[begin - first - 1] = self._ignore_index
        file.check()

    def starts(self, start: int, stop: int, base: int) -> list[int]:
        """Return the starts of documents in steps `[start, stop)`, all counted from step `base`."""
        base += self._first
        first, last = base + start, base + stop
        begin, end, found = self._found
        if first < begin or last > end:
            self._file.check_size()
            found = self._file.starts(first, last).tolist()
            self._file.check()
        return [place - base for place in found if first <= place < last]

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


def _marker(eos_token: int | None, bos_token: int | None) -> Marker | None:
    if bos_token is not None and eos_token is not None:
        raise ValueError("eos_token and bos_token are both given; one tells documents apart")
    name, token = ("bos_token", bos_token) if eos_token is None else ("eos_token", eos_token)
    if token is None:
        return None
    return Marker(whole_number(name, token, "give a token", 0), eos_token is not None)
