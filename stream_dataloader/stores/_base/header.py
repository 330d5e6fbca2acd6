"""store.json: the header of a packed store, which is written last.

Guarantee: a header that was read is of the kind and version that was asked for, and is as it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import read_json

__all__ = ["HEADER", "damage_told", "read_header", "write_header"]

HEADER = "store.json"

_MOST_HEADER_BYTES = 1 << 26


def write_header(folder: str, kind: str, version: int, content: Mapping[str, Any]) -> None:
    """Write store.json with `kind`, `version`, what else there is, and as `check` the checksum of all of it."""
    content = {"kind": f"stream_dataloader {kind}", "version": version} | dict(content)
    with open(os.path.join(folder, HEADER), "w", encoding="utf-8") as file:
        json.dump(content | {"check": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_header(folder: str, kind: str, version: int, called: str) -> dict[str, Any]:
    """Read store.json.

    Args:
        folder: The store.
        kind: See `write_header`.
        version: The one that can be read.
        called: The kind, for errors.

    Raises:
        StoreError: It is missing, damaged, of another version, or of another kind of store.
    """
    path = os.path.join(folder, HEADER)
    content: dict[str, Any] = read_json(path, dict, _MOST_HEADER_BYTES)
    if content.get("kind") != f"stream_dataloader {kind}":
        raise StoreError(f"{path} is not of {called}: its kind is {content.get('kind')!r}")
    if content.get("version") != version:
        raise StoreError(
            f"{path} is of version {content.get('version')!r}, and this release reads version {version}; pack it anew, "
            "or use the release that wrote it"
        )
    if content.get("check") != _digest({name: value for name, value in content.items() if name != "check"}):
        raise StoreError(f"{path} is damaged: its checksum is another; pack the store anew")
    return content


@contextmanager
def damage_told(path: str) -> Iterator[None]:
    """Have what goes wrong while a header's content is made use of say that the header is damaged.

    Args:
        path: The header's.

    Raises:
        StoreError: Names the header, and says what is wrong.
    """
    try:
        yield
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StoreError(f"{path} is damaged: {error}; pack the store anew") from None
