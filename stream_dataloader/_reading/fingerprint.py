"""What tells one list of sources from another.

Guarantee: equal lists have the same fingerprint in every process, on every machine and Python version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from stream_dataloader._items.content import hash_content
from stream_dataloader._reading.sources import MadeSources

_LOOKED_AT = 1024


def fingerprint_of(sources: Sequence[Any]) -> str:
    """A hash of a list of sources that does not depend on process, machine or Python version.

    Of sources that a sequence makes, of which there may be any number, it takes the number and some in even steps. If
    the sequence has a `fingerprint`, a string, it takes that instead of any source.
    Plain values, containers of them, paths, arrays, tensors and dataclasses count by content, other objects by
    their pickles, which may differ between versions.
    """
    digest = hashlib.blake2b(digest_size=16)
    looked_at = sources
    own = getattr(sources.sequence, "fingerprint", None) if isinstance(sources, MadeSources) else None
    if isinstance(own, str):
        looked_at = [len(sources), own]
    elif isinstance(sources, MadeSources) and len(sources) > _LOOKED_AT:
        looked_at = [len(sources), *(sources[i * len(sources) // _LOOKED_AT] for i in range(_LOOKED_AT)), sources[-1]]
    for source in looked_at:
        hash_content(source, digest.update)
    return digest.hexdigest()
