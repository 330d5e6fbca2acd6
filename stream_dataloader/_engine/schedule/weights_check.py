"""Checks of weights that users and saved states give; an error names the dataset and the value.

Guarantee: a function is called here and never again. So it need not be pickled, and all that it returns is checked
before anything is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._engine.schedule.mix import Mix
from stream_dataloader._engine.schedule.weighting import Counts, Weights, shares_of
from stream_dataloader.errors import shorten

_LEAST_SHARE = 1e-9  # of the largest weight: draws are counted in floats
_MOST_ASKED = 1 << 30  # draws that a function is asked for, if there is no end
_ASKED_WHILE_DOUBLING = 128


class _Given(NamedTuple):
    """Weights from a draw on, with the name that errors use."""

    name: str
    draw: int
    weights: Any


def weighted(mix: Mix, given: Any, *, lengths: Sequence[Counts] | None, endless: bool) -> Mix:
    """Return a mix with the weights that a user gave.

    Args:
        mix: The lists, without weights.
        given: None, numbers, a list of `(draws, weights)`, or a function of the draw.
        lengths: Items of each source of each list, if weights are shares of time steps.
        endless: Whether a list that is used up starts again for ever, with `"repeat"`.

    Raises:
        ValueError: A weight is out of range, or there is not one for each list. Or an epoch would have no end, or all
            sources of a list are empty, which has no share of the time steps.
        TypeError: They are none of these.
    """
    for number, items in enumerate(lengths or ()):
        if not items.any():
            raise ValueError(f'weights_by="steps", and the sources of datasets[{number}] have no items; leave it out')
    means = None if lengths is None else [float(items.mean()) for items in lengths]
    ends = "once" if mix.exhausted == "leave_out" else None if endless else "in full"
    mix = replace(mix, weights=checked_weights(given, mix.sizes, ends=ends, means=means))
    if ends == "in full" and (unreached := mix.never_in_full()) is not None:
        draw = mix.weights[-1][0]
        raise ValueError(
            f"datasets[{unreached}] has weight 0 from draw {draw:,} on, and was not drawn once in full by then, so an "
            'epoch with exhausted="repeat" would not end; give it a weight there, or choose exhausted="leave_out", or '
            'padding_mode="cycle"'
        )
    return mix


def checked_weights(given: Any, sizes: Sequence[int], *, ends: str | None, means: Sequence[float] | None) -> Weights:
    """Return the weights that a user gave: None, numbers, a list of `(draws, weights)`, or a function of the draw.

    Args:
        sizes: Number of sources of each list.
        ends: End of an epoch: `"once"`, after one draw of each source; `"in full"`, after at least one; None: never.
        means: Mean length of each list's sources, if weights are shares of steps.

    Raises:
        ValueError: A weight is out of range, or there is not one for each list.
        TypeError: They are none of these.
    """
    if given is None:
        given = [1.0] * len(sizes)
    if callable(given):
        # In an epoch that reads each source once, a dataset without weight is read last: it may get some later on.
        return _made(_answers(given, sizes, ends), len(sizes), means, all_have_some=ends != "once")
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(
            f"weights must be numbers, one per dataset, and are {shorten(given)}; or a list of (draws, weights), or a "
            "function of the draw"
        )
    listed = list(given)
    if not any(isinstance(one, (tuple, list)) for one in listed):
        return _made([_Given("weights", 0, listed)], len(sizes), means)
    return _made(_scheduled(listed), len(sizes), means)


def weights_of_plain(plain: Any, lists: int) -> Weights:
    """Return the weights of a saved state.

    Raises:
        ValueError: They cannot be.
        TypeError: They cannot be.
    """
    entries = _scheduled(plain) if isinstance(plain[0], list) else [_Given("weights", 0, plain)]
    return _made(entries, lists, None, all_have_some=False)


def plain_weights(weights: Weights) -> list[Any]:
    """Return the weights as plain data: numbers, or lists of a draw and numbers if they change."""
    if len(weights) == 1:
        return list(weights[0][1])
    return [[draw, list(row)] for draw, row in weights]


def _scheduled(listed: Sequence[Any]) -> Iterator[_Given]:
    before = -1
    for number, one in enumerate(listed):
        if not isinstance(one, (tuple, list)) or len(one) != 2:
            what = f"weights[{number}] is {shorten(one)}, and must be a pair like the others, (draws, weights)"
            raise TypeError(f"{what}: the draw from which on the weights hold, and one weight per dataset")
        try:
            draw = operator.index(one[0])
        except TypeError:
            what = f"weights[{number}] begins with {shorten(one[0])}, a {type(one[0]).__name__}"
            raise TypeError(f"{what}, and must with the number of the draw from which on the weights hold") from None
        if not number and draw:
            what = f"weights[0] holds from draw {draw} on, and draws are counted from 0"
            raise ValueError(f"{what}; put weights for the draws before it in front, (0, weights)")
        if draw <= before:
            what = f"weights[{number}] holds from draw {draw} on, and weights[{number - 1}] from draw {before} on"
            raise ValueError(f"{what}; their draws must ascend: sort the list, and name each draw once")
        before = draw
        yield _Given(f"weights[{number}][1]", draw, one[1])


def asked_draws(end: int) -> Iterator[int]:
    """Yield the draws for which a function is called: each of the first 256, then 128 while their number doubles."""
    draw = 0
    while draw < end:
        yield draw
        draw += max(1, (1 << draw.bit_length() - 1) // _ASKED_WHILE_DOUBLING) if draw else 1


def _answers(function: Callable[[int], Any], sizes: Sequence[int], ends: str | None) -> Iterator[_Given]:
    """Yield the answers of a function for the draws of an epoch."""
    end = sum(sizes) if ends == "once" else _MOST_ASKED
    drawn, before, shares = np.zeros(len(sizes)), 0, np.zeros(len(sizes))
    for draw in asked_draws(end):
        # How much was drawn of each list until here is only estimated: it decides when to stop asking, nothing else.
        drawn, before = drawn + shares * (draw - before), draw
        if ends == "in full" and (drawn >= sizes).all():
            return
        try:
            answer = function(draw)
        except Exception as error:
            what = f"weights({draw}) raised {shorten(error, 500)}"
            raise ValueError(f"{what}; it is called for {_asked(ends, end)}; let it return weights for each") from error
        given = _Given(f"weights({draw})", draw, answer)
        row = _row(given, len(sizes))
        shares = shares_of(row)
        yield given._replace(weights=row)


def _asked(ends: str | None, end: int) -> str:
    if ends == "in full":
        return "draws from 0 on, until each dataset was drawn once in full"
    return f"draws from 0 to {end - 1:,}" + ("" if ends else ", as the run has no end")


def _made(
    entries: Iterable[_Given], lists: int, means: Sequence[float] | None, *, all_have_some: bool = True
) -> Weights:
    found: list[tuple[int, tuple[float, ...]]] = []
    for given in entries:
        row = _row(given, lists)
        if means is not None:
            row = tuple([weight / mean for weight, mean in zip(row, means, strict=True)])
        _check_shares(given, row)
        # Equal neighbours are one entry, so that a function that never changes gives the same state as plain numbers.
        if not found or found[-1][1] != row:
            found.append((given.draw, row))
    for number in range(lists if all_have_some else 0):
        if not any(row[number] for _, row in found):
            named = f"weights[{number}] is 0.0" if len(found) == 1 else f"datasets[{number}] has weight 0 at every draw"
            raise ValueError(f"{named}, so nothing would be drawn from datasets[{number}]; leave it out")
    return tuple(found)


def _row(given: _Given, lists: int) -> tuple[float, ...]:
    """Return one weight for each list."""
    name, draw, weights = given
    # A text is a sequence, too: "12" would pass as the weights 1 and 2.
    if isinstance(weights, (str, bytes)):
        raise TypeError(f"{name} must be numbers, one per dataset, and is {shorten(weights)}")
    try:
        row = tuple([float(weight) for weight in weights])
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be numbers, one per dataset, and is {shorten(weights)}") from None
    if len(row) != lists:
        raise ValueError(f"{name} has {len(row)} weights, and there are {lists} datasets; pass one weight per dataset")
    when = "" if name == "weights" else f" from draw {draw:,} on"
    for number, weight in enumerate(row):
        if not 0 <= weight < np.inf:  # nor is NaN
            what = f"{name}[{number}] is {weight}, and the weight of datasets[{number}]{when} must be finite"
            raise ValueError(f"{what}, and at least 0; 0 draws nothing from it")
    if not any(row):
        raise ValueError(f"{name} is 0 for every dataset{when}, so nothing could be drawn; give one of them a weight")
    return row


def _check_shares(given: _Given, row: Sequence[float]) -> None:
    most = max(row)
    for number, weight in enumerate(row):
        if 0 < weight < _LEAST_SHARE * most:
            what = f"{given.name}[{number}] is {weight}, and must be 0 or at least {_LEAST_SHARE:g} of the largest"
            raise ValueError(f"{what}, {most}; draw more from datasets[{number}], or nothing")
