"""What a source of a file says: which file, and from where to where.

Guarantee: a file that cannot be read is refused by name, with what is wrong with it, before a decoder sees it.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

__all__ = ["Section", "check_file", "section_of"]


class Section(NamedTuple):
    """Part of a source, `[start, stop)`.

    Attributes:
        path: The whole source.
        start: Its first item.
        stop: The item behind its last; None is the source's end.
    """

    path: Any
    start: Any = 0
    stop: Any = None


def section_of(source: Any) -> Section:
    """The section that a source names: all of it, or `(path, start, stop)`.

    Raises:
        ValueError: A tuple of another length, or a section that ends before it starts.
    """
    if not isinstance(source, tuple):
        return Section(source)
    if len(source) != 3:
        raise ValueError(f"a source is a path or (path, start, stop), and this is a tuple of {len(source)}")
    section = Section(*source)
    start, stop = section.start or 0, section.stop
    if start < 0 or (stop is not None and stop < start):
        raise ValueError(f"start is {start} and stop is {stop}; give 0 <= start <= stop, or stop=None for the end")
    return section._replace(start=start)


def check_file(path: Any) -> str:
    """The path, if there is something to be read.

    Raises:
        OSError: There is no such file, it is a directory, or it may not be read.
        ValueError: It is empty.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a directory; give the files in it")
    try:
        with open(path, "rb") as file:
            empty = not os.fstat(file.fileno()).st_size and os.path.isfile(path)
    except OSError as error:
        raise type(error)(f"{path} cannot be opened: {error.strerror}") from error
    if empty:
        raise ValueError(f"{path} is empty, a file of zero bytes")
    return str(path)
