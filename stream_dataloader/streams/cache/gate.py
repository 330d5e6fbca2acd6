"""Check of files that data name: pictures of a table, sources of HDF5, links in a folder.

Guarantee: by default only regular files are opened, and only below the folder or URL that the user named. A URL that
data name is never opened. So data cannot make the library read other files or hosts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Literal
from urllib.parse import unquote

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.streams._media.section import check_kind
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["Files", "Gate", "check_files"]

#: Files that data may name.
Files = Literal["inside", "anywhere"]

_REMEDY = "copy it there, or give files='anywhere' if you trust the data"


def check_files(files: str) -> None:
    """Check the option `files`."""
    if files not in ("inside", "anywhere"):
        raise ValueError(f"files is {files!r}; use 'inside' or 'anywhere'")


class Gate:
    """Rule for the files that data may name: those below `folder`, which is a path or a URL, or any file.

    Files in the cache of Hugging Face's Hub are links into its folder of blobs, which counts as inside.
    """

    def __init__(self, folder: str, files: str = "inside") -> None:
        check_files(files)
        self._folder, self.anywhere = folder, files == "anywhere"
        self._roots: tuple[str, ...] = ()
        self._inside: set[str] = set()  # folders that were checked, so that a file costs one system call

    def named(self, name: str, what: str, *, base: str | None = None) -> str:
        """Return the path or URL of a file that `what` names, relative to `base`, by default the folder.

        Raises:
            StoreError: The file is outside, is a URL, is not a regular file, or does not exist.
        """
        base = self._folder if base is None else base
        if is_url(base):
            return self._below_url(name, what, base)
        if is_url(name):
            if not self.anywhere:
                raise StoreError(f"{what} names the URL {shorten(name)}, which is not read; {_REMEDY}")
            return name
        if "\0" in name:
            raise StoreError(f"{what} names {shorten(name)}, which is no file")
        return self.checked(os.path.join(base, name), what)

    def _below_url(self, name: str, what: str, base: str) -> str:
        if "::" in name and not is_url(name):  # with the base it would be a chain, and the last part would be opened
            raise StoreError(f"{what} names {shorten(name)}, which is no file")
        if is_url(name) or os.path.isabs(name):
            below = base.rstrip("/") + "/"
            if not self.anywhere and not (name.startswith(below) and ".." not in unquote(name).split("/")):
                raise StoreError(f"{what} names {shorten(name)}, outside of {base}; {_REMEDY}")
            return name
        if not self.anywhere and ".." in unquote(name).replace("\\", "/").split("/"):
            raise StoreError(f"{what} names {shorten(name)}, outside of {base}; {_REMEDY}")
        first, chain, rest = base.partition("::")
        return f"{first.rstrip('/')}/{name}{chain}{rest}"

    def checked(self, path: str, what: str = "") -> str:
        """Return the path of a file if it is regular and no link leads outside.

        Raises:
            StoreError: The file is outside, or does not exist.
            OSError: The path is a folder, a pipe, a socket or a device.
        """
        folder, name = os.path.split(path)
        try:
            if self.anywhere:
                check_kind(path, os.stat(path).st_mode)
                return path
            mode = os.lstat(path).st_mode
            real = path
            if stat.S_ISLNK(mode) or name in ("", ".", ".."):
                mode, real = os.stat(path).st_mode, os.path.realpath(path)
                if not self._lies_inside(real):
                    raise self._outside(path, what)
            elif folder not in self._inside:
                if not self._lies_inside(os.path.realpath(folder) + os.sep):
                    raise self._outside(path, what)
                self._inside.add(folder)
        except FileNotFoundError:
            raise StoreError(f"{what or self._folder} names {path}, which is missing") from None
        check_kind(path, mode)
        return path

    def check_links(self, folder: str | None = None, *, levels: int = 1 << 16) -> None:
        """Raise a StoreError if a folder, or a link in its first `levels` levels, leads outside.

        Folders whose name begins with a dot are not data, and are not checked.
        """
        above = self._folder
        if folder is not None:
            above = folder
            self.check_link(above)
        folders = [] if self.anywhere else [(above, levels)]
        while folders:
            place, left = folders.pop()
            with contextlib.suppress(PermissionError, FileNotFoundError), os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        self.check_link(entry.path)
                    elif left > 1 and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        folders.append((entry.path, left - 1))

    def check_link(self, path: str) -> None:
        """Raise a StoreError if a link to a file or a folder leads outside."""
        if not self.anywhere and not self._lies_inside(os.path.realpath(path) + os.sep):
            raise self._outside(path, "")

    def _lies_inside(self, real: str) -> bool:
        if not self._roots:
            root = os.path.realpath(self._folder)
            self._roots = (root.rstrip(os.sep) + os.sep, *_blobs_of(root))
        return real.startswith(self._roots)

    def _outside(self, path: str, what: str) -> StoreError:
        to = os.path.realpath(path)
        led = f"{path}, a link to {to}," if to != os.path.abspath(path) else path
        what = f"{what} names {led}" if what else led
        return StoreError(f"{what} outside of {self._folder}; {_REMEDY}")


def _blobs_of(root: str) -> tuple[str, ...]:
    """Return the folder of files that a snapshot in the Hub's cache links to: `.../snapshots/<commit>/...`."""
    above, snapshots, below = root.partition(f"{os.sep}snapshots{os.sep}")
    commit = below.split(os.sep)[0]
    is_commit = len(commit) == 40 and all(sign in "0123456789abcdef" for sign in commit)
    return (os.path.join(above, "blobs") + os.sep,) if snapshots and is_commit else ()
