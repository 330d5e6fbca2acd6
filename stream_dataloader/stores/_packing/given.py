"""What there is to pack: lists of sources, and what their streams are called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

from stream_dataloader._reading.lists import SourceList, SourceLists
from stream_dataloader._reading.stream import Retries
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten
from stream_dataloader.stores._base.store import Store

__all__ = ["Given", "given_of", "metadata_of"]


class Given(NamedTuple):
    """The streams to pack.

    Attributes:
        lists: Their sources, and what opens them.
        keys: Their names, each another.
        store: Where they come from, if that is a store.
        windowed: Items are windows, which are to be taken apart.
        seed: Of their random generators.
        retries: When one that breaks is opened again.
    """

    lists: SourceLists
    keys: Sequence[str]
    store: Store | None
    windowed: bool = False
    seed: int = 0
    retries: Retries = Retries(0, (), {})


def given_of(streams: Any, keys: Sequence[str] | Callable[[Any], str] | None) -> Given:
    """What `pack` was given."""
    how: tuple[Any, ...] = ()
    if isinstance(streams, StreamDataset):
        lists, rules = streams.source_lists, streams.rules
        how = rules.time_steps is None, rules.seed, Retries(streams.retries, streams.retry_on, {})
    else:
        try:
            sources, opens = streams
        except (TypeError, ValueError):
            raise TypeError(
                f"streams is {shorten(streams, 80)}; give a StreamDataset, or a pair (sources, open_stream)"
            ) from None
        empty = isinstance(sources, Sized) and not isinstance(sources, str) and not sources
        one = SourceList((), opens) if empty else SourceList.checked(sources, opens, None, None, None, None)
        lists = SourceLists([one])
    store = lists.open_stream if isinstance(lists.open_stream, Store) else None
    return Given(lists, _keys(lists.sources, keys, store), store, *how)


def _keys(sources: Sequence[Any], given: Any, store: Store | None) -> Sequence[str]:
    if callable(given):
        found = [str(given(source)) for source in sources]
    elif given is not None:
        found = [str(key) for key in given]
    else:
        found = [_key_of(source) if store is None else _key_in(store, source) for source in sources]
    if len(found) != len(sources):
        raise ValueError(f"keys has {len(found)} names, and there are {len(sources)} sources")
    taken, seen = set(found), set[str]()
    for number, key in enumerate(found):
        own = key
        while own in seen or (own is not key and own in taken):
            if given is not None:
                raise ValueError(f"keys has {key!r} twice; give each stream a name of its own")
            own = f"{own}#{number}"  # the same source twice is two streams
        seen.add(own)
        found[number] = own
    return found


def _key_of(source: Any) -> str:
    return os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else shorten(source)


def _key_in(store: Store, source: Any) -> str:
    if isinstance(source, (tuple, list)):
        return f"{store.key(source[0])}[{source[1] or 0}:{'' if source[2] is None else source[2]}]"
    return store.key(source)


def metadata_of(given: Given, metadata: Any) -> list[dict[str, Any]]:
    """What is known of each stream: what was given, or what their store has."""
    sources, store = given.lists.sources, given.store
    if metadata is None and store is not None:
        numbers = (source[0] if isinstance(source, (tuple, list)) else source for source in sources)
        metadata = map(store.metadata, numbers)
    elif metadata is None:
        metadata = ({} for _ in sources)
    elif callable(metadata):
        metadata = map(metadata, sources)
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
