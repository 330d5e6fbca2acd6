"""Other files that an HDF5 file reads from: by links, external storage and virtual datasets.

Guarantee: external links and storage can turn any file into an array, so they are refused by default. Virtual datasets
may name HDF5 files of the same folder. The gate checks each named file before HDF5 opens it. A file that is missing,
too small or was changed raises an error; HDF5 would deliver zeros.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.section import KnownFile
from stream_dataloader.streams.array.tables import chunks_of
from stream_dataloader.streams.cache.gate import Gate

__all__ = ["KnownFiles", "Sources", "check_size", "open_file", "written"]

#: Of a larger dataset, at least a thousandth must be on the disk.
_LARGEST_UNCHECKED_BYTES, _MOST_TIMES = 64 << 20, 1100

_MOST_LINKS, _ENDLESS = 16, 1 << 62
_ELSEWHERE = "lies in another file; copy it into this one, or give files='anywhere' if you trust the data"
_PATTERN = re.compile(rb"%\d*b")  # stands for a number in names of virtual sources


def open_file(path: str, name: str) -> Any:
    """Open an `h5py.File` for reading; `name` is its name in errors."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"reading {name} needs h5py: pip install 'stream-dataloader[hdf5]'") from error
    try:
        return h5py.File(path, "r", locking="best-effort")
    except BlockingIOError as error:
        remedy = "close it there, or set HDF5_USE_FILE_LOCKING=FALSE to read what is there"
        raise BlockingIOError(error.errno, f"{name} is open for writing elsewhere; {remedy}") from error
    except OSError as error:
        raise OSError(f"{name} is not a whole HDF5 file: {error}") from error


class KnownFiles(dict[str, KnownFile]):
    """Files by path, which are checked before and after a read."""

    def check(self) -> None:
        """Raise a StoreError if one of the files was changed."""
        for known in self.values():
            known.check()

    def __enter__(self) -> None:
        self.check()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.check()


class Sources:
    """Check of the files that an HDF5 file names, before they are opened; `known` collects them."""

    def __init__(self, gate: Gate, limits: Limits | None = None) -> None:
        self._gate, self._limits = gate, limits or DEFAULT
        self.known = KnownFiles()
        self.is_checked = False  # links and chunks were checked before, in a file that has not changed

    def check_links(self, group: Any, name: str, label: str, depth: int = 0, *, above: str = "") -> None:
        """Check the links on the way from a group to a name; the caller handles a missing one.

        Args:
            group: The group.
            name: The name to resolve in it.
            label: Name of the dataset in errors.
            depth: Number of links followed so far.
            above: The part of the name whose links were already checked.
        """
        from h5py import h5l

        links, parts = group.id.links, [part for part in name.split("/") if part not in ("", ".")]
        checked = len([part for part in above.split("/") if part not in ("", ".")]) if above else 0
        for count in range(checked + 1, len(parts) + 1):
            way = "/".join(parts[:count]).encode()
            try:
                kind = links.get_info(way).type
            except (KeyError, RuntimeError):  # h5py's versions differ
                return
            if kind == h5l.TYPE_HARD:
                continue
            if depth == _MOST_LINKS:
                raise StoreError(f"{label}: links lead from one to the next without an end")
            rest = parts[count:]
            if kind == h5l.TYPE_SOFT:
                target = os.fsdecode(links.get_val(way))
                if not target.startswith("/"):
                    target = "/".join([*parts[: count - 1], target])
                self.check_links(
                    group.file if target.startswith("/") else group, "/".join([target, *rest]), label, depth + 1
                )
                return
            if kind != h5l.TYPE_EXTERNAL:
                raise StoreError(f"{label}: {os.fsdecode(way)!r} is a link of a kind that is not read")
            if not self._gate.anywhere:
                raise StoreError(f"{label}: {os.fsdecode(way)!r} {_ELSEWHERE}")
            file, target = map(os.fsdecode, links.get_val(way))
            with self._other(file, group, f"{label}: the link {os.fsdecode(way)!r}") as opened:
                self.check_links(opened, "/".join([target, *rest]), label, depth + 1)
            return

    def check(self, dataset: Any, label: str, depth: int = 0) -> None:
        """Check the files that hold a dataset's values, and the size of its chunks."""
        from h5py import h5d

        # Cached by h5py: creating the list takes longer than everything that is done with it here.
        created = getattr(dataset, "_dcpl", None) or dataset.id.get_create_plist()
        layout = created.get_layout()
        if layout == h5d.CHUNKED:
            size = math.prod(created.get_chunk()) * dataset.id.get_type().get_size()
            if size > self._limits.chunk_bytes:
                self._limits.check_chunk(size, label)
        elif layout == h5d.VIRTUAL:
            if depth == _MOST_LINKS:
                raise StoreError(f"{label}: virtual datasets lead from one to the next without an end")
            for number in range(created.get_virtual_count()):
                self._check_virtual(dataset, created, number, label, depth + 1)
        else:
            for number in range(created.get_external_count()):
                if not self._gate.anywhere:
                    raise StoreError(f"{label} {_ELSEWHERE}")
                # HDF5 opens these relative to the current folder.
                path = os.path.abspath(os.fsdecode(created.get_external(number)[0]))
                self._gate.checked(path, f"{label}: its external storage")
                self.known.setdefault(path, KnownFile.of(path))

    def _check_virtual(self, dataset: Any, created: Any, number: int, label: str, depth: int) -> None:
        name, there = created.get_virtual_filename(number), created.get_virtual_dsetname(number)
        if any(_PATTERN.search(os.fsencode(text).replace(b"%%", b"")) for text in (name, there)):
            what = f"{label}: it is virtual, and names its sources by the pattern {name}:{there}"
            raise StoreError(f"{what}; map each of them by its name")
        what = f"{label}: it is virtual, and its source"
        with self._other(name, dataset, what) as opened:
            where = f"{label}: its source {opened.filename}:{there}"
            self.check_links(opened, there, where, depth)
            if not hasattr(source := opened.get(there), "id") or not hasattr(source, "shape"):
                raise StoreError(f"{where} is missing, and would be read as zeros")
            self.check(source, where, depth)
            wanted, mapped = created.get_virtual_srcspace(number), created.get_virtual_vspace(number)
            if not _fits(wanted, mapped, tuple(map(int, source.shape))):
                raise StoreError(f"{where} is {source.shape}, and does not fit what is read of it: it was changed")

    def check_written(self, dataset: Any, label: str, depth: int = 0) -> None:
        """Raise a StoreError if some values of a dataset are missing, which HDF5 would read as zeros."""
        self.check(dataset, label)
        there, whole = written(dataset)
        if there < whole:
            kind = "values" if dataset.is_virtual else "bytes" if dataset.chunks is None else "chunks"
            raise StoreError(f"{label} is half written: {there} of {whole} {kind}")
        if dataset.is_virtual and depth < _MOST_LINKS:
            created = dataset.id.get_create_plist()
            for number in range(created.get_virtual_count()):
                with self._other(created.get_virtual_filename(number), dataset, label) as opened:
                    name = created.get_virtual_dsetname(number)
                    self.check_written(opened[name], f"{label}: its source {opened.filename}:{name}", depth + 1)

    @contextmanager
    def _other(self, name: str, owner: Any, what: str) -> Iterator[Any]:
        """Open a file that the data name; `"."` is the file itself."""
        if name == ".":
            yield owner.file
            return
        # HDF5 looks in the file's folder first, and opens the file that it finds there.
        folder = os.path.dirname(os.path.abspath(owner.file.filename))
        path = self._gate.named(name, what, base=folder)
        self.known.setdefault(path, KnownFile.of(path))
        with contextlib.closing(open_file(path, path)) as opened:
            yield opened


def _fits(wanted: Any, mapped: Any, shape: tuple[int, ...]) -> bool:
    """Return True if the selection of a virtual dataset fits the shape of its source.

    If all of the source is selected, the file saves only the number of values.
    """
    from h5py import h5s

    count = mapped.get_select_npoints()
    if not 0 <= count < _ENDLESS:
        return True
    if wanted.get_select_type() != h5s.SEL_HYPERSLABS:
        return int(count) == math.prod(shape)
    _, last = wanted.get_select_bounds()
    return len(last) == len(shape) and all(int(place) < size for place, size in zip(last, shape, strict=True))


def check_size(name: str, dataset: Any) -> None:
    """Raise if a dataset claims much more data than the file has."""
    if dataset.nbytes > _LARGEST_UNCHECKED_BYTES:
        there, whole = written(dataset)
        if there * _MOST_TIMES < whole:
            found = f"{there:,} of {whole:,} {'values' if dataset.is_virtual else 'chunks'}"
            raise StoreError(f"{name} is {dataset.dtype} {dataset.shape}, but the file has only {found}")


def written(dataset: Any) -> tuple[int, int]:
    """Return the number of chunks or bytes on the disk, and in all; for a virtual dataset, of values."""
    if dataset.is_virtual:
        created = dataset.id.get_create_plist()
        spaces = [created.get_virtual_vspace(number) for number in range(created.get_virtual_count())]
        mapped = [space.get_select_npoints() for space in spaces]
        endless = any(not 0 <= count < _ENDLESS for count in mapped)
        return int(dataset.size) if endless else min(sum(mapped), int(dataset.size)), int(dataset.size)
    if dataset.chunks is None:
        if dataset.external:
            return dataset.nbytes, dataset.nbytes
        return dataset.id.get_storage_size(), dataset.nbytes
    return dataset.id.get_num_chunks(), chunks_of(dataset)
