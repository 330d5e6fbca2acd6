"""`TrainerRun`: the epochs of a loader, one after another, as one run whose batches a trainer only counts.

Guarantees: the next batch is always the loader's next one, whatever number is asked for; the state is that of the last
batch that was trained on, and what was fetched beyond it comes first when the trainer begins an epoch.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.integrations._all_ranks import place_of

_MOST_EPOCHS_COUNTED = 8  # one takes two seconds where there are 100,000 sources


#: A batch for the model, and what tells the loader's state as of it.
_Fetched = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]]]


class TrainerRun(Dataset[Mapping[str, Any]]):
    """The loader's batches, epoch after epoch; which number is asked for does not matter.

    So the numbers that a Trainer skips when it resumes cost nothing, as the loader stands behind them already.
    `inputs` makes the model's arguments of a batch, `state` is where the loader begins, with the first batch that is
    asked for, and `batches` the number of batches of a Trainer's epoch, None if unknown.
    """

    def __init__(
        self,
        loader: StreamDataLoader[Any],
        inputs: Callable[[Any], Mapping[str, Any]],
        state: Mapping[str, Any],
        batches: int | None,
    ) -> None:
        self.batches = batches
        self._loader, self._inputs = loader, inputs
        self._begin: Mapping[str, Any] | None = state
        self._used: Callable[[], Mapping[str, Any]] = lambda: state  # the state as of the last batch trained on
        self._unused: deque[_Fetched] = deque()  # fetched, and not trained on yet
        self._returned: deque[_Fetched] = deque()  # not trained on when the Trainer left its epoch: they come first
        self._epoch: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Number of lanes' windows of a Trainer's epoch, padding included."""
        return len(Numbers(self)) * self._loader.batch_size

    def __getitem__(self, number: Any) -> Mapping[str, Any]:
        fetched = self._returned.popleft() if self._returned else self._fetch()
        self._unused.append(fetched)
        return fetched[0]

    def _fetch(self) -> _Fetched:
        if self._begin is not None:
            self._loader.load_state_dict(self._begin)
            self._begin = None
        for _ in range(3):  # of the epoch before there is nothing left, nor may there be of the one that was loaded
            for batch in self._epoch:
                place = place_of(self._loader)
                assert place is not None  # a batch of it was just fetched
                return self._inputs(batch), place
            self._epoch = iter(self._loader)
        raise StopIteration  # a whole epoch without a batch; the Trainer says so

    def return_unused(self) -> None:
        """A Trainer's epoch begins: what was fetched in the one before, and not trained on, comes first."""
        self._returned.extendleft(reversed(self._unused))
        self._unused.clear()

    def was_used(self) -> None:
        """The next batch was trained on."""
        if self._unused:
            _, self._used = self._unused.popleft()

    def state_dict(self) -> Mapping[str, Any]:
        """The loader's state as of the last batch trained on."""
        return self._used()


class Numbers:
    """Numbers for the batches of a Trainer's epoch, in lists of one; without an end if their number is not known."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run

    def __iter__(self) -> Iterator[list[int]]:
        self._run.return_unused()
        batches = self._run.batches
        yield from ([number] for number in (itertools.count() if batches is None else range(batches)))

    def __len__(self) -> int:
        if self._run.batches is None:
            raise TypeError("the number of batches is not known; pass lengths= to StreamDataset, or max_steps")
        return self._run.batches


def batches_an_epoch(loader: StreamDataLoader[Any], epochs: int) -> int | None:
    """The mean number of batches of the coming epochs, rounded up: so many times `epochs` have all of them whole."""
    state = loader.state_dict()
    first, count = state["epoch"], min(max(epochs, 1), _MOST_EPOCHS_COUNTED)
    total = 0
    try:
        for epoch in range(first, first + count):
            loader.set_epoch(epoch)
            total += len(loader)
    except TypeError:
        return None
    finally:
        loader.load_state_dict(state)
    return math.ceil(total / count)
