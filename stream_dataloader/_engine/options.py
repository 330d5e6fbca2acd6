"""Checks of options when a dataset or loader is built: an error names value, limit and remedy."""

from __future__ import annotations

import inspect
import multiprocessing
import numbers
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import IterableDataset

from stream_dataloader._engine.hints import hint_for
from stream_dataloader._engine.schedule.changes import CHANGES
from stream_dataloader._engine.schedule.mix import Exhausted, Schedule
from stream_dataloader._engine.schedule.rules import IntArray, PaddingMode, Rules, Windows
from stream_dataloader.errors import shorten

_LARGEST = 2**63 - 1
_MOST_LANES = 1 << 20
_MOST_LOOKAHEAD = 1 << 10  # each lane's reservations take memory that all workers share
_MOST_ITEMS = 1 << 48  # of a stream, so that the lengths of millions of streams can be added up
_MOST_SECONDS = 1e6  # a wait in C counts milliseconds in 32 bits; rounded down


def integer(name: str, value: Any, least: int, most: int = _LARGEST) -> int:
    """Return `value` as an int from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, and is {shorten(value)}, a {type(value).__name__}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, and is {value}")
    if number < least:
        raise ValueError(f"{name} is {number}, and must be at least {least}")
    if number > most:
        raise ValueError(f"{name} is {number}, and must be at most {most}")
    return number


def check_changes(changes: Iterable[str]) -> tuple[str, ...]:
    """Return `changes` of `load_state_dict` as a tuple; a single name is allowed, too."""
    names = (changes,) if isinstance(changes, str) else tuple(changes)
    for name in names:
        if name not in CHANGES:
            raise ValueError(f"changes has {shorten(name)}, and may have {', '.join(CHANGES)}")
    return names


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool, if it is True, False, a NumPy bool, 0 or 1; refuse a text, as `"False"` is true."""
    if isinstance(value, np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, and is {shorten(value)}, a {type(value).__name__}")


def exceptions(name: str, value: Any) -> tuple[type[Exception], ...]:
    """Return `value`, one class of exceptions or several, as a tuple."""
    kinds = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"{name} must be classes of exceptions, such as OSError, and has {shorten(kind)}")
    return kinds


def seconds(name: str, value: Any) -> float:
    """Return `value` as a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds, and is {shorten(value)}, a {type(value).__name__}")
    number = float(value)
    if not 0 <= number <= _MOST_SECONDS:  # written so that NaN fails, too
        raise ValueError(f"{name} is {number:g} seconds, and must be from 0 to {_MOST_SECONDS:g}")
    return number


def choice(name: str, value: Any, literal: Any, *, optional: bool = False) -> Any:
    """Return `value` if it is one of the strings of a `Literal`, or None if it is optional."""
    choices = (*get_args(literal), *([None] if optional else []))
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name} is {shorten(value)}, and must be one of {', '.join(map(repr, choices))}")
    return value


def mixing(exhausted: Any, weights_by: Any, *, endless: bool) -> tuple[Exhausted, bool]:
    """Return what happens to a dataset that is used up, and whether weights are shares of time steps."""
    if exhausted is None:
        exhausted = "repeat" if endless else "leave_out"
    exhausted = choice("exhausted", exhausted, Exhausted)
    return exhausted, choice("weights_by", weights_by, Literal["sources", "steps"]) == "steps"


def check_callable(name: str, value: Any, example: str) -> Callable[..., Any]:
    """Return `value` if it is callable."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, and is {shorten(value)}, a {type(value).__name__}; pass {example}")
    result: Callable[..., Any] = value
    return result


def check_sources(sources: Any) -> Iterable[Any]:
    """Return `sources` if they are an ordered collection, not a single source."""
    if isinstance(sources, (str, bytes, bytearray, os.PathLike)):
        kind = type(sources).__name__
        raise TypeError(f"sources must be a list of sources, and {shorten(sources)} is one {kind}; pass [source]")
    if isinstance(sources, Mapping):
        what = f"sources is a {type(sources).__name__}, whose keys alone would be read"
        raise TypeError(f"{what}; pass list(sources.items()), its keys, or its values; a DatasetDict to stores.open")
    if hasattr(sources, "columns"):  # a data frame of pandas or polars, or a table of Arrow
        what = f"sources is a {type(sources).__name__}, whose columns would be read, and not its rows"
        raise TypeError(f"{what}; pass one column, or a list of rows, such as frame.to_dict('records') of pandas")
    if isinstance(sources, IterableDataset):
        what = f"sources is a {type(sources).__name__}, which would be read to its end to make a list"
        raise TypeError(f"{what}; open a Hugging Face dataset with stores.open")
    if isinstance(sources, (set, frozenset)):  # a set of strings has another order in each process
        raise TypeError(
            "sources is a set, which has no fixed order; pass a sorted list, so that seeds and saved states keep their "
            "meaning"
        )
    try:
        iter(sources)
    except TypeError:
        raise TypeError(
            f"sources must be a list of sources, and is {shorten(sources)}, a {type(sources).__name__}"
        ) from None
    checked: Iterable[Any] = sources
    return checked


def check_context(context: Any) -> str | BaseContext | None:
    """Return `multiprocessing_context` if it is None, a start method or a context."""
    methods = multiprocessing.get_all_start_methods()
    if context is None or isinstance(context, BaseContext) or (isinstance(context, str) and context in methods):
        return context
    error = ValueError if isinstance(context, str) else TypeError
    known = ", ".join(map(repr, methods))
    raise error(f"multiprocessing_context is {shorten(context)}, and must be {known}, a context, or None")


def num_workers(value: Any, lanes: int) -> int:
    """Return `num_workers`, but at most the number of lanes."""
    number = integer("num_workers", value, 0)
    if number > lanes:
        warnings.warn(
            f"num_workers is {number}, and batch_size {lanes}: a worker reads whole lanes, so {lanes} are used",
            stacklevel=3,
        )
    return min(number, lanes)


def check_seed_globals(seeds: bool, what: str, *, in_threads: bool) -> None:
    """Refuse `seed_globals` if several threads would draw from the generators of one process.

    Args:
        what: The option that makes threads read.
    """
    if seeds and in_threads:
        raise ValueError(
            f"seed_globals is True, and {what}: the threads of a process share its generators, so they cannot be kept "
            "for each stream; leave it out, or draw from get_stream_info().rng_at(position) instead of with "
            "seed_globals"
        )


def warn_of_idle_lanes(rules: Rules) -> None:
    """Warn if there are fewer than half as many sources as lanes."""
    if 2 * rules.draws < rules.lanes and rules.padding_mode in ("zeros", "data"):
        what = "are padding in every batch" if rules.padding_mode == "zeros" else "only re-read sources of other lanes"
        warnings.warn(
            f"batch_size is {rules.lanes}, and there are sources for {rules.draws} of these lanes: the others {what}; "
            "lower batch_size, or cut the sources by sections=",
            stacklevel=3,
        )


#: Options of torch's `DataLoader`, and the place of those that have another name here.
_BELONGS = {
    "drop_last": 'drop_last is the dataset\'s padding_mode="drop", which ends the epoch at the first idle lane',
    "sampler": "there is no sampler, as streams have no indices: the dataset's shuffle, schedule and seed decide",
    "batch_sampler": "streams have no indices; LaneBatchSampler is a batch_sampler for torch's own DataLoader",
    "generator": "generator is the dataset's seed=",
    "in_order": "batches always come in order; sources do not with the dataset's deterministic=False",
    "pin_memory_device": "pin_memory_device is device=",
}


def refuse_misplaced(given: Mapping[str, Any], dataset: type, loader: type) -> None:
    """Raise an error for options that a loader does not have, saying where they belong."""
    if given:
        dataset_has = inspect.signature(dataset).parameters
        of_dataset = f"{{0}} is the dataset's: {dataset.__name__}(..., {{0}}=...)".format

        def unknown(name: str) -> str:
            loader_has = inspect.signature(loader).parameters.values()
            known = [*(one.name for one in loader_has if one.kind is not one.VAR_KEYWORD), *dataset_has]
            return "; ".join(filter(None, [f"a StreamDataLoader has no option {name}", hint_for(name, known)]))

        told = (_BELONGS.get(name) or (of_dataset if name in dataset_has else unknown)(name) for name in given)
        raise TypeError("; ".join(told))


def batches_per_epoch(value: Any, padding_mode: PaddingMode) -> int | None:
    """Return `batches_per_epoch`, which only an endless run can guarantee."""
    if value is None:
        return None
    number = integer("batches_per_epoch", value, 1)
    if padding_mode != "cycle":
        what = f'batches_per_epoch is {number}, which needs padding_mode="cycle"'
        raise ValueError(f"{what} of the dataset, and it is {padding_mode!r}; use that mode, or leave the option out")
    return number


def check_lengths(lengths: Sequence[int] | IntArray | None, num_sources: int) -> IntArray | None:
    """Return `lengths` as an int64 array `(num_sources,)`."""
    if lengths is None:
        return None
    array = np.asarray(lengths)
    if array.shape != (num_sources,) or (array.size and array.dtype.kind not in "iu"):
        what = f"of shape {array.shape}, {array.dtype}"
        raise ValueError(f"lengths must be {num_sources} integers, one per source, and is {what}")
    for wrong, limit in ((array < 0, "at least 0"), (array > _MOST_ITEMS, f"at most {_MOST_ITEMS}")):
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(f"lengths[{index}] is {array[index]}, and must be {limit}")
    return array.astype(np.int64)


def check_rules(rules: Rules, lookahead: Any, *, has_lengths: bool) -> Rules:
    """Check the user's options, and return them as rules."""
    if lookahead is None:
        lookahead = 1 if rules.schedule is None else 0
    rules = replace(
        rules,
        lanes=integer("batch_size", rules.lanes, 1, _MOST_LANES),
        padding_mode=choice("padding_mode", rules.padding_mode, PaddingMode),
        windows=choice("windows", rules.windows, Windows),
        time_steps=None if rules.time_steps is None else integer("time_steps", rules.time_steps, 1, 2**31),
        lookahead=integer("lookahead", lookahead, 0, _MOST_LOOKAHEAD),
        shuffle=flag("shuffle", rules.shuffle),
        schedule=choice("schedule", rules.schedule, Schedule, optional=True),
        seed=integer("seed", rules.seed, 0),
        deterministic=flag("deterministic", rules.deterministic),
    )
    if rules.num_sources == 0:
        raise ValueError("sources is empty; pass at least one source")
    if rules.schedule == "balanced" and not rules.shuffle:
        raise ValueError(
            'schedule="balanced" is a random order, and shuffle is False; pass shuffle=True, or '
            'schedule="longest_first" for the same order in each epoch'
        )
    if rules.schedule is not None and not has_lengths:
        raise ValueError(f"schedule={rules.schedule!r} needs lengths=, the number of items of each source")
    if rules.windows == "packed" and rules.time_steps is None:
        raise ValueError('windows="packed" needs time_steps=, the number of steps of a window')
    if rules.windows == "given" and rules.time_steps is not None:
        what = f'time_steps is {rules.time_steps}, and windows="given" means that streams cut their own windows'
        raise ValueError(f"{what}; leave out one of the two")
    check_groups(rules)
    return rules


def given_options(rules: Rules) -> str:
    """Return the options of a dataset or a sampler that differ from their defaults, and the seed, as in a call."""
    defaults = {
        "padding_mode": "zeros",
        "windows": "aligned",
        "shuffle": False,
        "schedule": None,
        "deterministic": True,
    }
    given = {"batch_size": rules.lanes} | ({} if rules.time_steps is None else {"time_steps": rules.time_steps})
    changed = {name: getattr(rules, name) for name, usual in defaults.items() if getattr(rules, name) != usual}
    return ", ".join(f"{name}={value!r}" for name, value in (given | changed | {"seed": rules.seed}).items())


def check_items(rules: Rules) -> None:
    """Refuse to guess whether an item is a window: a picture (3, H, W) could be 3 time steps of (H, W)."""
    if rules.time_steps is None and rules.windows != "given":
        raise ValueError(
            "neither time_steps nor windows is given, so an item may be one time step or a whole window; pass "
            "time_steps=T to StreamDataset if its streams yield single time steps, to be cut into windows of T, or "
            'windows="given" if they yield whole windows, with a leading time axis'
        )


def check_windows_context(context: Any, time_steps: int | None, *, deterministic: bool = True) -> int:
    """Return `context`, the number of items that windows begin with."""
    steps = integer("context", context, 0, 2**31)
    if steps and time_steps is None:
        what = f"context is {steps}, and time_steps is None, so streams cut their own windows"
        raise ValueError(f"{what}; pass time_steps=, or have the streams yield windows that overlap")
    if steps and not deterministic:
        what = f"context is {steps}, and deterministic=False is for live streams, which cannot go back"
        raise ValueError(f"{what}; leave one of the two out")
    return steps


def check_step_factory(open_stream: Any, time_steps: int | None) -> None:
    """Refuse the library's own streams of single time steps without `time_steps`."""
    if time_steps is None and getattr(open_stream, "_yields_steps", False):
        name = type(open_stream).__name__
        raise ValueError(f"{name} yields single time steps; pass time_steps=, the number of them in a window")


def check_ranks(virtual_ranks: Any, rank: Any, world_size: Any, process_group: Any) -> None:
    """Refuse impossible ranks."""
    if virtual_ranks is not None:
        integer("virtual_ranks", virtual_ranks, 1, 2**31)
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank}, and world_size {world_size}; pass both, or neither")
    if rank is not None and world_size is not None:
        integer("world_size", world_size, 1, 2**31)
        integer("rank", rank, 0, world_size - 1)
        if process_group is not None:
            raise ValueError("process_group= already sets rank and world size; leave out rank= and world_size=")


def check_groups(rules: Rules) -> None:
    """Refuse lanes or sources that virtual ranks cannot share."""
    groups, lanes = rules.groups, rules.lanes
    if lanes % groups.count:
        what = f"batch_size is {lanes}, and {groups.count} virtual ranks are hosted on each rank"
        raise ValueError(f"{what}, with equal numbers of lanes; pass a multiple of {groups.count}")
    if groups.total > 1 and rules.draws < groups.total:
        raise ValueError(f"there are {rules.draws} sources for {groups.total} virtual ranks; each needs at least one")
    if rules.padding_mode == "drop" and rules.draws // groups.total < rules.lanes_of_a_group:
        everywhere = groups.total * rules.lanes_of_a_group
        what = f'with padding_mode="drop", {rules.draws} sources leave some of {everywhere} lanes idle from the start'
        most = rules.draws // groups.total * groups.count
        raise ValueError(f"{what}; lower batch_size to at most {most}, or pad")
