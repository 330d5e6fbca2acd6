"""What there is to pack: lists of sources, and what their streams are called."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from stream_dataloader._items.content import hash_content
from stream_dataloader._reading.lists import SourceList, SourceLists
from stream_dataloader._reading.stream import Retries
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten
from stream_dataloader.stores._base.store import Store

__all__ = ["digest_of", "given_of", "keys_of", "notes_of"]


def given_of(streams: Any) -> tuple[SourceLists, int, dict[str, Any]]:
    """The sources and what opens them, their seed, and how they are read."""
    if isinstance(streams, StreamDataset):
        retries = Retries(streams.retries, streams.retry_on, {})
        rules = streams.rules
        return streams.source_lists, rules.seed, {"windowed": rules.time_steps is None, "retries": retries}
    try:
        sources, opens = streams
    except (TypeError, ValueError):
        found = shorten(streams, 80)
        raise TypeError(f"streams is {found}; give a StreamDataset, or (sources, open_stream)") from None
    empty = isinstance(sources, Sized) and not isinstance(sources, str) and not sources
    one = SourceList((), opens) if empty else SourceList.checked(sources, opens, None, None, None, None)
    return SourceLists([one]), 0, {}


def keys_of(sources: Sequence[Any], given: Any, store: Store | None) -> list[str]:
    """What streams are called, each otherwise."""
    if given is None:
        found = [_key_of(source, store) for source in sources]
    else:
        found = [str(key) for key in (map(given, sources) if callable(given) else given)]
    if len(found) != len(sources):
        raise ValueError(f"keys has {len(found)} names, and there are {len(sources)} sources")
    seen = set[str]()
    for number, key in enumerate(found):
        if key in seen and given is not None:
            raise ValueError(f"keys has {key!r} twice; give each stream a name of its own")
        own = key
        while own in seen:
            own = f"{own}#{number}"  # the same source twice is two streams
        seen.add(own)
        found[number] = own
    return found


def _key_of(source: Any, store: Store | None) -> str:
    if store is None:
        return os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else shorten(source)
    if isinstance(source, (tuple, list)):
        number, start, stop = source
        return f"{store.key(number)}[{start or 0}:{'' if stop is None else stop}]"
    return store.key(source)


def notes_of(sources: Sequence[Any], given: Any, store: Store | None) -> list[dict[str, Any]]:
    """What is known of each stream: what was given, or what their store has."""
    metadata: Iterable[Mapping[str, Any]] = ({} for _ in sources)
    if given is not None:
        metadata = map(given, sources) if callable(given) else given
    elif store is not None:
        metadata = (store.metadata(one[0] if isinstance(one, (tuple, list)) else one) for one in sources)
    found = [dict(one) for one in metadata]
    if len(found) != len(sources):
        raise ValueError(f"stream_metadata has {len(found)} dicts, and there are {len(sources)} sources")
    for number, one in enumerate(found):
        try:
            json.dumps(one)
        except (TypeError, ValueError) as error:
            source = shorten(sources[number])
            raise TypeError(f"the metadata of source {number} ({source}) cannot be kept as JSON: {error}") from None
    return found


def digest_of(content: Any) -> str:
    """A hash of it, in short."""
    found = hashlib.blake2b(digest_size=8)
    hash_content(content, found.update)
    return found.hexdigest()
