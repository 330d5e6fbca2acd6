"""Contract of resuming: a loader continues exactly from every place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader._engine.reading.starts import IGNORES_START, ignores_start
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.stream_info import StreamInfo

__all__ = ["check_resume"]

_MOST_SOURCES = 8  # opened to see whether `start` is used


def leaf_key(leaf: Any) -> Any:
    """Return a leaf as a value that `==` compares bit for bit."""
    if isinstance(leaf, torch.Tensor):
        tensor = leaf.detach().cpu().contiguous()
        return str(leaf.dtype), tuple(leaf.shape), tensor.flatten().view(torch.uint8).numpy().tobytes()
    if hasattr(leaf, "tobytes") and hasattr(leaf, "dtype"):
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    return leaf


def batch_key(batch: Any) -> Any:
    """Return everything in a batch, except `worker_id` and `stream_seed`, as values that `==` compares.

    The seeds differ between two loaders whose datasets have no `seed`.
    """
    if isinstance(batch, StreamBatch):
        bookkeeping = "reset", "is_first", "is_last", "mask", "source_index", "position", "lane", "batch_index", "epoch"
        return {name: map_leaves(getattr(batch, name), leaf_key) for name in ("data", *bookkeeping, "context")}
    return map_leaves(batch, leaf_key)


def check_resume(
    make_loader: Callable[[int], StreamDataLoader],
    *,
    num_workers: Sequence[int] = (0, 2),
    epochs: int = 2,
    plain: bool = True,
    limit: int | None = None,
) -> int:
    """Check that a loader continues bit for bit from every place, even if it was itself resumed.

    Args:
        make_loader: Builds a new loader with a given number of workers.
        num_workers: Numbers of workers, used in turn.
        epochs: Number of epochs to check.
        plain: Send each state through json.
        limit: Largest number of batches to check in an epoch, for endless epochs.

    Returns:
        The number of places checked.

    Raises:
        AssertionError: A resumed loader continued differently; the message names the place.
    """
    whole = make_loader(num_workers[0])
    if isinstance(whole.dataset, StreamDataset):
        _check_starts(whole.dataset)
    expected = [[batch_key(batch) for batch in itertools.islice(whole, limit)] for _ in range(epochs)]
    counts, places = itertools.cycle(num_workers), 0

    def saved(loader: StreamDataLoader) -> dict[str, Any]:
        state = loader.state_dict()
        return json.loads(json.dumps(state)) if plain else state

    def resumed(state: dict[str, Any]) -> StreamDataLoader:
        loader = make_loader(next(counts))
        loader.load_state_dict(state)
        return loader

    state = saved(make_loader(next(counts)))
    for epoch, batches in enumerate(expected):
        for step in range(len(batches) + 1):
            if step == len(batches) and _epoch_of(state) > epoch:
                break  # the end is known with the last batch: this state is the next epoch's beginning
            place = f"resumed in epoch {epoch} before batch {step}"
            rest = [batch_key(batch) for batch in itertools.islice(resumed(state), limit and limit - step)]
            assert rest == batches[step:], f"{place}: {_difference(rest, batches[step:])}"
            places += 1
            loader = resumed(state)
            assert saved(loader) == state, f"{place}: the state changed by being loaded"
            iterator = iter(loader)
            if step < len(batches):
                assert batch_key(next(iterator)) == batches[step], place
            elif limit is None:
                assert next(iterator, None) is None, place
            else:
                loader.set_epoch(epoch + 1)
            state = saved(loader)
            del iterator
    return places


def _check_starts(dataset: StreamDataset) -> None:
    """Check that the first sources, opened with `start=1`, begin with their second item."""
    plan = dataset._plan()
    for index in range(min(len(plan.lists.sources), _MOST_SOURCES)):
        info = StreamInfo(index, 0, 0, 0, plan.rules.seed, source_key=plan.lists.key(index))
        ignores = ignores_start(plan.lists.of(index).open_stream, plan.lists.sources[index], 1, info)
        assert not ignores, f"source {index}: {IGNORES_START}"


def _epoch_of(state: dict[str, Any]) -> int:
    number: int = state["epoch_place"]["number"] if "epoch_place" in state else state["epoch"]
    return number


def _difference(found: list[Any], expected: list[Any]) -> str:
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"the batch {i} after it differs"
    return f"{len(found)} batches follow, expected {len(expected)}"
