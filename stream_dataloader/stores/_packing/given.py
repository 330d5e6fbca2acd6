"""What there is to pack: the sources, how to open them, and what the streams are called."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stream_dataloader._items.content import hash_content
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten
from stream_dataloader.stores._base.store import Store

__all__ = ["Given", "given_of"]


@dataclass(frozen=True)
class Given:
    """The streams to pack.

    Attributes:
        sources: Their sources, by number.
        factory_of: What opens a stream, by its number.
        keys: Their names, each another.
        metadata: What is known of each.
        lengths: Time steps of each, -1 where that is not known; None: of none.
        windowed: Items are windows of several time steps, which are to be taken apart.
        seed: Of their random generators; None: nobody said.
        store: Where they come from, if that is a store.
        retries: How often a stream is opened again where it broke.
        retry_on: For which exceptions.
    """

    sources: Sequence[Any]
    factory_of: Callable[[int], Callable[[Any], Any]]
    keys: Sequence[str]
    metadata: Callable[[int], Mapping[str, Any]]
    lengths: Sequence[int] | None
    windowed: bool
    seed: int | None
    store: Store | None
    retries: int
    retry_on: Any

    def __len__(self) -> int:
        return len(self.sources)

    def fingerprint(self) -> str:
        """Tells one list of sources, with other names, from another."""
        digest = hashlib.blake2b(digest_size=16)
        own = getattr(self.sources, "fingerprint", None)
        for value in [own] if isinstance(own, str) else self.sources:
            hash_content(value, digest.update)
        for key in self.keys:
            hash_content(key, digest.update)
        return digest.hexdigest()


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
    factory_of: Callable[[int], Any]
    if isinstance(streams, StreamDataset):
        sources, open_stream, factory_of = streams.sources, streams.open_stream, streams.factory_of
    else:
        try:
            sources, open_stream = streams
        except (TypeError, ValueError):
            raise TypeError(
                f"streams is {shorten(streams, 80)}; give a StreamDataset, or a pair (sources, open_stream) such as "
                "stores.open returns"
            ) from None
        factory_of = functools.partial(_always, open_stream)
    if not callable(open_stream):
        raise TypeError(f"open_stream is {shorten(open_stream, 80)}; give a function that opens one source")
    if isinstance(sources, (str, bytes, os.PathLike)):
        raise TypeError(f"sources is {shorten(sources, 80)}, which is one source; give a list of them")
    sources = sources if isinstance(sources, Sequence) else list(sources)
    store = open_stream if isinstance(open_stream, Store) else None
    rules = getattr(streams, "rules", None)
    lengths = getattr(streams, "lengths", None)
    windowed = rules is not None and rules.time_steps is None
    if store is not None and lengths is None and store.lengths is not None:
        lengths = [store.length(source) for source in sources]
    return Given(
        sources,
        factory_of,
        _keys(sources, keys, store),
        _metadata(sources, metadata, store),
        None if windowed else lengths,
        windowed,
        getattr(rules, "seed", None),
        store,
        getattr(streams, "retries", 0),
        getattr(streams, "retry_on", Exception),
    )


def _always(open_stream: Callable[[Any], Any], _: int) -> Callable[[Any], Any]:
    """What opens each stream, if it is the same for all."""
    return open_stream


def _keys(sources: Sequence[Any], given: Any, store: Store | None) -> Sequence[str]:
    if given is not None and not callable(given):
        found = [str(key) for key in given]
        if len(found) != len(sources):
            raise ValueError(f"keys has {len(found)} names, and there are {len(sources)} sources; give one for each")
    else:
        name = given or (_key_of if store is None else lambda source: _key_in(store, source))
        found = [str(name(source)) for source in sources]
    if len(set(found)) == len(found):
        return found
    if given is not None:
        seen: set[str] = set()
        twice = next(key for key in found if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"keys has {twice!r} twice; give each stream a name of its own")
    return _made_different(found)


def _made_different(keys: list[str]) -> list[str]:
    """The same source twice is two streams: the later one has its number behind its name."""
    taken, made = set(keys), []
    seen: set[str] = set()
    for number, key in enumerate(keys):
        own = key
        while own in seen or (own is not key and own in taken):
            own = f"{own}#{number}"
        seen.add(own)
        made.append(own)
    return made


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
    if store is not None:
        known = store
        return lambda number: known.metadata(
            sources[number][0] if isinstance(sources[number], (tuple, list)) else sources[number]
        )
    return lambda _: {}
