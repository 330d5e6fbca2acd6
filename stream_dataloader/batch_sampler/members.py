"""Groups of several datasets for one sampler: which dataset a group is of, and the mix by which lanes draw from them.

Guarantee: groups are drawn as by `interleave` over these datasets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stream_dataloader._engine import options
from stream_dataloader._engine.schedule.mix import Mix
from stream_dataloader._engine.schedule.rules import IntArray, Rules
from stream_dataloader._engine.schedule.weights_check import weighted
from stream_dataloader.errors import shorten


def member_bounds(members: Any, groups: int, **needs_members: Any) -> list[int]:
    """Return the index of each dataset's first group, and the number of groups.

    Args:
        members: The number of the dataset that each group is of; None: there is only one.
        groups: Number of groups.
        **needs_members: Options that mean nothing for a single dataset, with what was given for them.

    Raises:
        ValueError: There is not one number for each group, the numbers descend or leave one out, or they are missing.
        TypeError: They are no integers.
    """
    if members is None:
        if given := [name for name, value in needs_members.items() if value is not None]:
            what = f"{given[0]}= says how to draw from several datasets, and members= is missing"
            raise ValueError(f"{what}; pass the number of the dataset that each group is of")
        return [0, groups]
    if isinstance(members, (str, bytes)) or not isinstance(members, Iterable):
        raise TypeError(f"members is {shorten(members)}, a {type(members).__name__}; pass one number for each group")
    numbers = np.asarray(members if hasattr(members, "__array__") else list(members))
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise TypeError(f"members is {shorten(members)}; pass one integer for each group, the number of its dataset")
    if len(numbers) != groups:
        raise ValueError(f"members has {len(numbers)} numbers, and there are {groups} groups; pass one for each group")
    steps = np.diff(numbers.astype(np.int64), prepend=-1)
    wrong = np.flatnonzero((steps < 0) | (steps > 1) | (numbers < 0))
    if numbers[0] != 0 or len(wrong):
        at = 0 if numbers[0] != 0 else int(wrong[0])
        before = f"members[{at - 1}] is {numbers[at - 1]}" if at else "datasets are counted from 0"
        raise ValueError(
            f"members[{at}] is {numbers[at]}, and {before}: groups of a dataset must follow each other, datasets in "
            "order, as in a ConcatDataset; sort the groups by member, and leave no number out"
        )
    return [*np.flatnonzero(steps).tolist(), groups]


def with_mix(
    rules: Rules, lengths: Sequence[IntArray], lookahead: Any, *, weights: Any, weights_by: Any, exhausted: Any
) -> Rules:
    """Return the rules by which lanes draw from several datasets.

    Args:
        rules: Rules of all groups as those of one dataset; its `shuffle` and `schedule` are those of each dataset.
        lengths: Numbers of items of each dataset's groups, or sections.
        lookahead: The lookahead that the user gave.
        weights: See `interleave`, like the options that follow.

    Raises:
        ValueError: See `interleave`.
        TypeError: See `interleave`.
    """
    endless = rules.padding_mode == "cycle"
    weights_by = "sources" if weights_by is None else weights_by
    exhausted, by_steps = options.mixing(exhausted, weights_by, endless=endless)
    sizes, count = tuple(map(len, lengths)), len(lengths)
    mix = Mix(sizes, (), exhausted, (rules.shuffle,) * count, (rules.schedule,) * count)
    mix = weighted(mix, weights, lengths=lengths if by_steps else None, endless=endless)
    return options.check_rules(replace(rules, schedule=None, mix=mix), lookahead, has_lengths=True)
