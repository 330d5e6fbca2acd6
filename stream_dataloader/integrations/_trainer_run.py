"""Data of a Trainer: a loader's epochs as one run of batches, and batches as a model's arguments.

Guarantee: whichever number the Trainer asks for, it gets the loader's next batch.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.integrations._all_ranks import place_of

_MOST_EPOCHS_COUNTED = 8  # counting one takes two seconds with 100,000 sources


#: A batch for the model, and a function that returns the loader's state after it.
_Fetched = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]]]


class TrainerRun(Dataset[Mapping[str, Any]]):
    """The loader's batches from `state` on, epoch after epoch, whichever number is asked for."""

    def __init__(
        self,
        loader: StreamDataLoader[Any],
        inputs: Callable[[Any], Mapping[str, Any]],
        state: Mapping[str, Any],
        batches: int | None,
    ) -> None:
        self.batches = batches  # of a Trainer's epoch; None if unknown
        self._loader, self._inputs = loader, inputs
        self._begin: Mapping[str, Any] | None = state
        self._used: Callable[[], Mapping[str, Any]] = lambda: state  # state after the last batch trained on
        self._unused: deque[_Fetched] = deque()  # fetched, and not trained on yet
        self._returned: deque[_Fetched] = deque()  # left over from the last Trainer's epoch; delivered first
        self._epoch: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Return the number of windows of a Trainer's epoch, padding included."""
        return len(Numbers(self)) * self._loader.batch_size

    def __getitem__(self, number: Any) -> Mapping[str, Any]:
        fetched = self._returned.popleft() if self._returned else self._fetch()
        self._unused.append(fetched)
        return fetched[0]

    def _fetch(self) -> _Fetched:
        if self._begin is not None:
            self._loader.load_state_dict(self._begin)
            self._begin = None
        for _ in range(3):  # the current epoch may be over, and the one that was loaded too
            for batch in self._epoch:
                place = place_of(self._loader)
                assert place is not None  # a batch of it was just fetched
                return self._inputs(batch), place
            self._epoch = iter(self._loader)
        raise StopIteration  # a whole epoch had no batch; the Trainer reports this

    def return_unused(self) -> None:
        """Begin a Trainer's epoch with the batches that the epoch before fetched but did not train on."""
        self._returned.extendleft(reversed(self._unused))
        self._unused.clear()

    def was_used(self) -> None:
        if self._unused:
            _, self._used = self._unused.popleft()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the loader's state after the last batch trained on."""
        return self._used()


class Numbers:
    """Numbers of a Trainer's batches, in lists of one. They are endless if the number of batches is not known."""

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
    """Return the mean number of batches of the coming epochs, rounded up, or None if it is not known."""
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


class ModelInputs:
    """Function that makes the keyword arguments of a model from a `StreamBatch` whose streams yield dicts.

    Args:
        batch_first: True: the data are `(B, T, ...)`, as models of transformers expect them; this costs a copy.
            False: `(T, B, ...)`, as the loader delivers them and torch's recurrent layers expect them.
        fields: Names of fields of `StreamBatch` that the model receives beside the data, such as `"reset"`, `"mask"`
            and `"is_first"`, or `"position_ids"`: the positions, with 0 for padding. A dict passes them under
            the model's own names: `{"attention_mask": "mask"}`. None: the fields that the model's `forward` names.

    Example::

        StreamTrainer(model, args, train_dataset=loader, model_inputs=ModelInputs(fields=["reset", "position_ids"]))
    """

    #: Names that a `forward` may have as arguments.
    FIELDS = ("reset", "is_first", "mask", "source_index", "position", "position_ids", "lane")

    def __init__(self, *, batch_first: bool = True, fields: Mapping[str, str] | Iterable[str] | None = None) -> None:
        self.batch_first = batch_first
        if isinstance(fields, str):
            raise TypeError(f"fields must be a list or a dict of names, not {fields!r}; write [{fields!r}]")
        if fields is not None and not isinstance(fields, Mapping):
            fields = {name: name for name in fields}
        self.fields: dict[str, str] | None = None if fields is None else dict(fields)
        if unknown := [name for name in (self.fields or {}).values() if name not in self.FIELDS]:
            raise ValueError(f"fields has {unknown[0]!r}; the known names are {', '.join(self.FIELDS)}")

    def of(self, model: torch.nn.Module) -> ModelInputs:
        """Return these inputs with the fields that a model's `forward` names, unless fields were given."""
        if self.fields is not None:
            return self
        base = getattr(model, "get_base_model", lambda: model)()  # the `forward` of peft's models names no arguments
        named = inspect.signature(base.forward).parameters
        return ModelInputs(batch_first=self.batch_first, fields=[name for name in self.FIELDS if name in named])

    def __call__(self, batch: StreamBatch) -> dict[str, Any]:
        if not isinstance(batch.data, dict):
            what = f"a model takes arguments by name, but the streams yield a {type(batch.data).__name__}"
            raise TypeError(f'{what}; have them yield {{"input_ids": ...}}, or pass a function as model_inputs')
        fields = self.fields or {}
        if both := [name for name in fields if name in batch.data]:
            what = f"the streams yield {both[0]!r}, and the batch has a field of the same name"
            raise ValueError(f"{what}; choose one with ModelInputs(fields={{name of the model: field}})")
        values = batch.data | {name: self._field(batch, field) for name, field in fields.items()}
        if not self.batch_first:
            return values
        return {name: map_leaves(value, _batch_first) for name, value in values.items()}

    @staticmethod
    def _field(batch: StreamBatch, name: str) -> Any:
        return batch.position.clamp(min=0) if name == "position_ids" else getattr(batch, name)


def _batch_first(leaf: Any) -> Any:
    """Return a leaf as `(B, T, ...)`; a leaf with lanes alone is not changed."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
        return leaf.transpose(0, 1).contiguous()  # models of transformers call `view`
    return leaf
