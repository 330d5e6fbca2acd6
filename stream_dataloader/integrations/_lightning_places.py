"""`Places`: where loaders stood after each of the last batches that Lightning trained on.

Lightning fetches a batch ahead if it does not know an epoch's length, and a checkpoint may be saved before, during or
after a batch. So the places of the last few batches are kept, by the number of batches trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from stream_dataloader._ranks.place import is_started
from stream_dataloader._schedule.saved_state import merge_states
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.integrations._all_ranks import State, gathered, place_of


class Count(NamedTuple):
    """How many batches of an epoch Lightning has fetched, begun, and trained on."""

    fetched: int
    ready: int
    processed: int


class Places:
    """Remembers places; a state is made of one only when it is asked for."""

    def __init__(self) -> None:
        self._after: dict[int, dict[StreamDataLoader[Any], Callable[[], State]]] = {}
        self._loaded: dict[StreamDataLoader[Any], Callable[[], State]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process, where loaders are copies too, knows no place."""
        return Places, ()

    def restart(self, loaders: Iterable[Any]) -> None:
        """A checkpoint was loaded: remember the states that it gave."""
        self._loaded = {loader: _giving(loader.state_dict()) for loader in stream_loaders(loaders)}

    def begin(self, loaders: Iterable[Any], count: Count) -> None:
        """Training begins: remember where loaders stand."""
        begin = {
            loader: self._loaded.get(loader) or place_of(loader, count.fetched) or _giving(loader.state_dict())
            for loader in stream_loaders(loaders)
        }
        self._after, self._loaded = {count.processed: begin}, {}

    def turn(self, processed: int) -> None:
        """An epoch ended after `processed` batches, and the next one begins there."""
        places = self._after.get(processed)
        self._after = {} if places is None else {processed: places, 0: places}

    def note(self, loaders: Iterable[Any], count: Count) -> None:
        """A batch is about to be trained on: remember where loaders stand."""
        if count.ready == 1:
            self._after = {0: self._after[0]} if 0 in self._after else {}
        loaders = list(loaders)
        for number in range(count.ready - 1, count.fetched + 1):
            if number not in self._after or number == count.fetched:
                places = {loader: place_of(loader, count.fetched - number) for loader in stream_loaders(loaders)}
                self._after[number] = {loader: place for loader, place in places.items() if place is not None}
        for number in [number for number in self._after if number < count.ready - 1]:
            del self._after[number]

    def handed_over(self, loaders: Iterable[Any]) -> list[tuple[StreamDataLoader[Any], State]]:
        """Loaders that take the place of others, with the states that those ended with."""
        last = self._after[max(self._after)] if self._after else {}
        pairs = zip(stream_loaders(loaders), last.items(), strict=False)
        return [(new, place()) for new, (old, place) in pairs if new is not old]

    def state_of(self, loader: StreamDataLoader[Any], processed: int) -> State | None:
        """The state after so many batches; None if it is not known."""
        place = self._after.get(processed, {}).get(loader)
        return None if place is None else place()


def stream_loaders(loaders: Iterable[Any]) -> list[StreamDataLoader[Any]]:
    """Those of ours."""
    return [loader for loader in loaders if isinstance(loader, StreamDataLoader)]


def _giving(state: State) -> Callable[[], State]:
    return lambda: state


def of_all_ranks(loader: StreamDataLoader[Any], state: State) -> State:
    """The whole of which each rank has a part; only one rank writes checkpoints.

    Ranks that read the same, as model-parallel ones do, are there several times.
    """
    place = loader._ranks[0]._place
    if place.world_size == 1 or not is_started():
        return state
    return merge_states(list(dict(gathered((place.rank, state))).values()))
