"""`interleave`: lanes draw their sources from several datasets, by weights that may change as the training goes on.

Guarantees: all promises hold over the sources of all datasets. Each dataset opens its own sources, in its own order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from stream_dataloader._engine import options
from stream_dataloader._engine.hints import hint_for
from stream_dataloader._engine.map_style.streams import CommonOptions
from stream_dataloader._engine.reading.lists import SourceList, SourceLists
from stream_dataloader._engine.schedule.mix import Exhausted, Mix, Schedule
from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader._engine.schedule.sections import Cuts
from stream_dataloader._engine.schedule.weights_check import weighted
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SharedOptions", "interleave"]

Weights: TypeAlias = "Iterable[float] | Iterable[tuple[int, Sequence[float]]] | Callable[[int], Sequence[float]]"


class SharedOptions(CommonOptions, total=False):
    """Options that all datasets of one mix share."""

    batch_size: int


def interleave(
    datasets: Iterable[StreamDataset],
    weights: Weights | None = None,
    *,
    weights_by: Literal["sources", "steps"] = "sources",
    exhausted: Exhausted | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    **shared: Unpack[SharedOptions],
) -> StreamDataset:
    """Read several datasets together: each lane draws its next source from one of them, by weight.

    The result is a `StreamDataset` of all sources, dataset after dataset. `batch.source_index` and
    `get_stream_info().source_index` count over all datasets; `locate` returns the dataset and the index in it. Each
    dataset's `open_stream`, `lengths`, `shuffle` and `schedule` still apply to its own sources.

    Weights may change as sources are drawn. Draws are counted from 0 over all lanes and ranks: from the beginning of
    the run if the mix never ends (`exhausted="repeat"` with `padding_mode="cycle"`), else from that of each epoch. A
    run can also be resumed with other weights: `load_state_dict(state, changes=["weights"])`.

    Args:
        datasets: The datasets.
        weights: One positive number for each dataset, at any scale; None means equal weights. Or a list of
            `(draws, weights)`: after that many draws these weights hold, the first after 0; a dataset may have 0 for a
            while. Or a function of the number of draws made, which returns the weights. It is called when the mix is
            built: for each of the first 256 draws, and then 128 times while their number doubles, up to the end of an
            epoch, or to 2**30.
        weights_by: `"sources"`: weights are shares of the sources drawn, or of the sections. `"steps"`: they are shares
            of the time steps read. Each weight is then divided by the mean length of its dataset's sources, so all
            datasets need `lengths`.
        exhausted: Treatment of a dataset once all its sources were drawn. `"leave_out"`: the dataset is left out, and
            the others share the draws by their weights; every source comes once. `"repeat"`: the dataset starts again,
            in a new order with its `shuffle`, and with new random numbers in its streams; repeated sources count as
            new data (`mask` is set). The epoch ends when each dataset was drawn once in full, so with equal weights it
            has as many draws as the largest dataset has sources, times the number of datasets. None means
            `"leave_out"`, or `"repeat"` with `padding_mode="cycle"`: the mix then never ends, and each pass over a
            dataset is an epoch for that dataset. With `"cycle"` and `"leave_out"`, each pass over all datasets is an
            epoch.
        shuffle: True draws at random, seeded from (seed, epoch). False draws as evenly as possible, in the same order
            each epoch. None means True if one of the datasets has `shuffle=True`. Each dataset's own `shuffle` decides
            whether its sources are shuffled.
        seed: Seeds all random draws, also within the datasets. None means the first dataset's seed. The other datasets'
            seeds are not used.
        **shared: `batch_size`, `padding_mode`, `fill_value`, `time_steps`, `windows`, `deterministic`, `lookahead`,
            `on_error`, `max_failures`, `retries`, `retry_on`, `mark_ends`, `seed_globals` and `context`, as for
            `StreamDataset`. The datasets must agree on each option that is not passed here.

    Raises:
        ValueError: There are no datasets, they disagree on an option, there is not one weight for each, a weight is
            negative or not finite, all are 0, a schedule's draws do not ascend, or `weights_by="steps"` needs lengths
            that are not known.
        TypeError: One is not a `StreamDataset`, or is interleaved itself; or weights are none.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset, interleave
        >>> words = StreamDataset(["to", "be", "or", "no"], lambda text: map(ord, text), batch_size=1, time_steps=2)
        >>> numbers = StreamDataset([70, 80], lambda n: iter([n, n + 1]), batch_size=1, time_steps=2)
        >>> dataset = interleave([words, numbers], weights=[3, 1])
        >>> for batch in StreamDataLoader(dataset):
        ...     print(dataset.locate(batch.source_index[0, 0]), batch.data[:, 0].tolist())
        (0, 0) [116, 111]
        (0, 1) [98, 101]
        (1, 0) [70, 71]
        (0, 2) [111, 114]
        (0, 3) [110, 111]
        (1, 1) [80, 81]
    """
    listed = _check_datasets(datasets)
    agreed = _agreed(listed, shared)
    endless = agreed.get("padding_mode") == "cycle"
    exhausted, by_steps = options.mixing(exhausted, weights_by, endless=endless)
    mixed_by = functools.partial(
        _mixed_lists,
        list(weights) if isinstance(weights, Iterator) else weights,
        exhausted,
        tuple([(one._rules.shuffle, one._rules.schedule) for one in listed]),
        by_steps=by_steps,
        endless=endless,
    )
    lists = mixed_by([one for dataset in listed for one in dataset._source_lists.lists])
    if shuffle is None:
        shuffle = any(one._rules.shuffle for one in listed)
    mixed = StreamDataset(
        lists,
        listed[0].open_stream,  # not used, as each list has its own
        seed=listed[0]._rules.seed if seed is None else seed,
        shuffle=shuffle,
        **agreed,
    )
    mixed._mixed = mixed_by
    for dataset in listed:
        dataset._list_readers.add(mixed)
    return mixed


def _check_datasets(datasets: Any) -> list[StreamDataset]:
    if isinstance(datasets, StreamDataset):
        raise TypeError("datasets must be a list of StreamDatasets, and is one; pass [dataset, ...]")
    listed = list(datasets)
    if not listed:
        raise ValueError("datasets is empty; pass at least one StreamDataset")
    for number, dataset in enumerate(listed):
        if not isinstance(dataset, StreamDataset):
            raise TypeError(f"datasets[{number}] must be a StreamDataset, and is a {type(dataset).__name__}")
        if dataset._source_lists.mix is not None:
            what = f"datasets[{number}] is interleaved itself"
            raise TypeError(f"{what}; pass its datasets instead, with their weights in it times its own weight")
    return listed


def _mixed_lists(
    weights: Any,
    exhausted: Exhausted,
    rules: Sequence[tuple[bool, Schedule | None]],
    lists: Iterable[SourceList],
    *,
    by_steps: bool,
    endless: bool,
) -> SourceLists:
    """Return the lists of several datasets with their mix, given the `shuffle` and `schedule` of each."""
    lists, shuffles, schedules = tuple(lists), *zip(*rules, strict=True)
    cuts = [SourceLists([one]).cuts(0) for one in lists]
    sizes = [len(one.sources) if cut is None else len(cut) for one, cut in zip(lists, cuts, strict=True)]
    lengths = [_lengths(number, *own) for number, own in enumerate(zip(lists, cuts, strict=True))] if by_steps else None
    mix = weighted(Mix(tuple(sizes), (), exhausted, shuffles, schedules), weights, lengths=lengths, endless=endless)
    return SourceLists(lists, mix)


def _lengths(number: int, own: SourceList, cuts: Cuts | None) -> IntArray:
    """Return the numbers of time steps of a dataset's sources, or of its sections."""
    if own.lengths is None:
        raise ValueError(f'weights_by="steps" needs lengths, and datasets[{number}] has none; pass lengths= to it')
    return own.lengths if cuts is None else cuts.lengths(0)


def _agreed(datasets: Sequence[StreamDataset], given: SharedOptions) -> SharedOptions:
    """Return the shared options: those that were passed, and those that all datasets agree on."""
    names = list(SharedOptions.__annotations__)
    if unknown := sorted(given.keys() - set(names)):
        own = [*inspect.signature(interleave).parameters, *names]
        hint = hint_for(unknown[0], own) or f"the datasets share {', '.join(names)}"
        raise TypeError(f"interleave has no option {unknown[0]!r}; {hint}")
    agreed: Any = dict(given)
    for name in (name for name in names if name not in given):
        found = [(n, getattr(own, name, getattr(own._rules, name, None))) for n, own in enumerate(datasets)]
        if name == "lookahead":  # a default of 0, which only follows from a schedule, agrees with any number
            free = [own._given_lookahead is None and own._rules.schedule is not None for own in datasets]
            found = [one for one, is_free in zip(found, free, strict=True) if not is_free] or [(0, None)]
        if name == "mark_ends":  # a default, which follows from the lengths, agrees with any value
            said = [(n, own._given_mark_ends) for n, own in enumerate(datasets)]
            found = [one for one in said if one[1] is not None] or [(0, None)]
        first, agreed[name] = found[0]
        for number, option in found:
            if not _same(option, agreed[name]):
                one, other = shorten(agreed[name]), shorten(option)
                what = f"datasets[{first}] has {name}={one} and datasets[{number}] has {name}={other}"
                raise ValueError(f"{what}; build them alike, or pass {name}= to interleave")
    result: SharedOptions = agreed
    return result


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) or isinstance(other, dict):  # a fill value for each leaf
        return type(one) is type(other) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return one is other or bool(np.array_equal(one, other))
