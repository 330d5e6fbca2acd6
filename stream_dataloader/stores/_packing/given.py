"""What there is to pack: lists of sources, and what their streams are called."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from stream_dataloader._reading.lists import SourceList, SourceLists
from stream_dataloader._reading.stream import Retries
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten
from stream_dataloader.stores._base.store import Store

__all__ = ["Given", "given_of"]


class Given(NamedTuple):
    """The streams to pack.

    Attributes:
        lists: Their sources, and what opens them.
        windowed: Items are windows of several time steps, which are to be taken apart.
        seed: Of their random generators.
        retries: When one that breaks is opened again.
        keys: Their names, each another.
        metadata: What is known of each.
        store: Where they come from, if that is a store.
    """

    lists: SourceLists
    windowed: bool
    seed: int
    retries: Retries
    keys: Sequence[str]
    metadata: Callable[[int], Mapping[str, Any]]
    store: Store | None

    def fingerprint(self) -> str:
        """Tells one list of sources, with other names, from another."""
        text = repr([self.lists.fingerprint, *self.keys])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def given_of(
    streams: Any,
    keys: Sequence[str] | Callable[[Any], str] | None,
    metadata: Sequence[Mapping[str, Any]] | Callable[[Any], Mapping[str, Any]] | None,
) -> Given:
    """What `pack` was given.

    Raises:
        TypeError: It is neither a dataset nor a pair, or the factory cannot be called.
        ValueError: Names or metadata are not as many as streams, or two streams have one name.
    """
    windowed, seed, retries = False, 0, Retries(0, (), {})
    if isinstance(streams, StreamDataset):
        lists, rules = streams.source_lists, streams.rules
        windowed, seed = rules.time_steps is None, rules.seed
        retries = Retries(streams.retries, streams.retry_on, {})
    else:
        try:
            sources, opens = streams
        except (TypeError, ValueError):
            raise TypeError(
                f"streams is {shorten(streams, 80)}; give a StreamDataset, or a pair (sources, open_stream) such as "
                "stores.open returns"
            ) from None
        lengths: Any = None
        if isinstance(opens, Store) and opens.lengths is not None:
            sources = list(sources)
            lengths = [opens.length(source) for source in sources]
        empty = isinstance(sources, Sized) and not isinstance(sources, str) and not sources
        one = SourceList((), opens) if empty else SourceList.checked(sources, opens, None, lengths, None, None)
        lists = SourceLists([one])
    store = lists.open_stream if isinstance(lists.open_stream, Store) else None
    names, notes = _keys(lists.sources, keys, store), _metadata(lists.sources, metadata, store)
    return Given(lists, windowed, seed, retries, names, notes, store)


def _keys(sources: Sequence[Any], given: Any, store: Store | None) -> Sequence[str]:
    if given is not None and not callable(given):
        found = [str(key) for key in given]
        if len(found) != len(sources):
            raise ValueError(f"keys has {len(found)} names, and there are {len(sources)} sources; give one for each")
    else:
        name = given or (_key_of if store is None else lambda source: _key_in(store, source))
        found = [str(name(source)) for source in sources]
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
    if isinstance(source, (str, os.PathLike)):
        return os.fsdecode(source)
    return shorten(source)


def _key_in(store: Store, source: Any) -> str:
    if isinstance(source, (tuple, list)):
        return f"{store.key(source[0])}[{source[1] or 0}:{'' if source[2] is None else source[2]}]"
    return store.key(source)


def _metadata(sources: Sequence[Any], given: Any, store: Store | None) -> Callable[[int], Mapping[str, Any]]:
    if callable(given):
        return lambda number: dict(given(sources[number]))
    if given is not None:
        if len(given) != len(sources):
            raise ValueError(f"stream_metadata has {len(given)} dicts, and there are {len(sources)} sources")
        return lambda number: dict(given[number])
    if store is None:
        return lambda _: {}
    known = store

    def of_store(number: int) -> Mapping[str, Any]:
        source = sources[number]
        return known.metadata(source[0] if isinstance(source, (tuple, list)) else source)

    return of_store
