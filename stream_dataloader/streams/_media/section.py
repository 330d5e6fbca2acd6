"""Checks that all streams share: of options, and of sources that are files or sections of files.

Guarantee: a file that cannot be read raises an error with its name. Data read within `with known:` are those that the
file had when the `KnownFile` was made, or an error is raised. A file that became shorter is not read at all, because
reading mapped memory beyond its end would kill the process (SIGBUS).
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from stream_dataloader.errors import StoreError

__all__ = [
    "DIGITS",
    "KnownFile",
    "OnCorrupt",
    "Section",
    "check_file",
    "check_flags",
    "check_kind",
    "check_numbers",
    "check_options",
    "closed_on_error",
    "file_version",
    "is_section",
    "natural_order",
    "section_of",
    "whole_number",
]

#: Actions for damaged data.
OnCorrupt = Literal["raise", "keep", "drop"]

DIGITS = re.compile("([0-9]+)")


class Section(NamedTuple):
    """Part of a source, `[start, stop)`; a `stop` of None is the source's end."""

    path: Any
    start: Any = 0
    stop: Any = None


def is_section(source: Any) -> bool:
    """Return True if a source is a tuple, or a list that begins with a path (JSON has no tuples)."""
    return isinstance(source, tuple) or (
        isinstance(source, list) and bool(source) and isinstance(source[0], (str, bytes, os.PathLike))
    )


def section_of(source: Any) -> Section:
    """Return the section that a source names."""
    if not is_section(source):
        return Section(source)
    if len(source) != 3:
        kind = type(source).__name__
        raise ValueError(f"a source is a path or (path, start, stop), and this is a {kind} of {len(source)}")
    path, start, stop = source
    start, stop = _place("start", start or 0), None if stop is None else _place("stop", stop)
    if start < 0 or (stop is not None and stop < start):
        raise ValueError(f"start is {start} and stop is {stop}; give 0 <= start <= stop, or stop=None for the end")
    if start and stop is not None and isinstance(start, float) != isinstance(stop, float):
        raise ValueError(f"start is {start} and stop is {stop}; give both as ints, which count, or both in seconds")
    return Section(path, start, stop)


def _place(name: str, value: Any) -> int | float:
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            return operator.index(value)
        if isinstance(value, (float, np.floating)) and math.isfinite(value):
            return float(value)
    raise ValueError(f"{name} is {value!r}; give an int, which counts, or a float, in seconds")


def whole_number(name: str, value: Any, remedy: str, least: int, most: float = math.inf) -> int:
    """Return an option's value as an int, or raise if it is not one or out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, which is no whole number; {remedy}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; {remedy}")
    return number


def check_numbers(options: Any, **allowed: tuple[str, int] | tuple[str, int, int]) -> None:
    """Convert options to ints; `allowed` has for each the remedy, the least value, and maybe the largest."""
    for name, limits in allowed.items():
        value = getattr(options, name)
        if value is not None or getattr(type(options), name, 0) is not None:
            object.__setattr__(options, name, whole_number(name, value, *limits))


def check_flags(kind: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check that the options of `kind` with a default of True or False are bools."""
    for name, parameter in signature(kind).parameters.items():
        value = given.get(name, parameter.default)
        if not isinstance(parameter.default, bool) or isinstance(value, np.bool_):
            continue
        if not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(f"{name} is {value!r}; give True or False")


def check_options(options: Any) -> None:
    """Check the options of a dataclass that are literals or flags."""
    for name, allowed in _choices(options.__class__).items():
        if (value := getattr(options, name)) not in allowed:
            error = TypeError if allowed == [False, True] else ValueError
            raise error(f"{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")


@functools.cache
def _choices(kind: type) -> dict[str, list[Any]]:
    found = {}
    for name, hint in get_type_hints(kind).items():
        kinds = (hint, *get_args(hint))
        choices = [choice for one in kinds if get_origin(one) is Literal for choice in get_args(one)]
        if choices or hint is bool:
            found[name] = [*choices, *([None] if NoneType in kinds else [])] or [False, True]
    return found


@contextmanager
def closed_on_error(resource: Any) -> Iterator[None]:
    """Close a resource if the step that takes it over fails."""
    try:
        yield
    except BaseException:
        resource.close()
        raise


def check_file(path: Any) -> str:
    """Return the path if it is a file that can be read and is not empty; raise otherwise."""
    path = os.fspath(path)
    try:
        check_kind(path, os.stat(path).st_mode)
        with open(path, "rb") as file:
            empty = not os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(f"{path} cannot be opened: {error.strerror}") from error
    if empty:
        raise ValueError(f"{path} is empty, a file of zero bytes")
    return str(path)


def check_kind(path: Any, mode: int) -> None:
    """Raise for a directory, a pipe, a socket or a device, before it is opened."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a directory; give the files in it")
    kinds = {stat.S_IFIFO: "a pipe (FIFO)", stat.S_IFSOCK: "a socket"}
    raise OSError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}; write its data to a file")


def natural_order(name: str) -> tuple[Any, str]:
    """Return the `key` for `sorted` that sorts numbers in names as numbers."""
    parts = DIGITS.split(name)
    digits = [part.lstrip("0") for part in parts[1::2]]
    return list(zip(parts[::2], [*((len(found), found) for found in digits), (0, "")], strict=True)), name


def file_version(status: os.stat_result) -> tuple[int, int, int]:
    """Return numbers that change if a local file is written to or replaced; what copies a file may keep the others."""
    return status.st_ino, status.st_size, status.st_mtime_ns


class KnownFile(NamedTuple):
    """Size and times of a file when it was first seen, to detect changes; `descriptor` is the open file's, or -1."""

    path: str
    inode: int
    size: int
    modified_ns: int
    name: str
    descriptor: int = -1

    @classmethod
    def of(cls, path: str, descriptor: int = -1, *, name: str | None = None) -> KnownFile:
        """Return the file as it is now."""
        found = os.stat(path) if descriptor < 0 else os.fstat(descriptor)
        return cls(path, *file_version(found), name or path, descriptor)

    def check(self) -> None:
        """Raise a `StoreError` if the file was cut off, replaced or written to."""
        try:
            found = os.stat(self.path) if self.descriptor < 0 else os.fstat(self.descriptor)
        except FileNotFoundError:
            raise StoreError(f"{self.name} is missing: it was deleted or moved since it was opened") from None
        if found.st_size < self.size:
            left = f"{found.st_size:,} bytes are left of {self.size:,}"
            raise StoreError(f"{self.name} was cut off while it was read: {left}")
        if file_version(found) != (self.inode, self.size, self.modified_ns):
            raise StoreError(f"{self.name} is another file now: replaced or written to; open it again")

    def __enter__(self) -> None:
        self.check()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):  # a change of the file may be the cause of another error
            self.check()
