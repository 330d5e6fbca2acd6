"""The tickets that a lane holds ahead of need: the one rule by which a lane takes its next source.

::

    lookahead = 2       held            the lane takes
    it starts           -               reserves a b c, takes a
    next                b c             reserves d,     takes b
    d is refused        c (d)           reserves e,     takes c        refused: no source, for good
    next                (d) (e)         takes d, which was refused: from now on it takes each source when it needs it

Workers, the main process that follows them, and the count of an epoch's steps all use this rule. Where a ticket is
decided as soon as it is taken out, it is its own grant. Only where others may come before it is it a number below
`PENDING`, and its grant is waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

from stream_dataloader._schedule.rules import NONE, PENDING

#: The tickets that a lane holds, in order; none at the epoch's beginning. None: it takes no more tickets ahead.
Held: TypeAlias = tuple[int, ...] | None


def next_grant(
    held: Held, lookahead: int, take: Callable[[bool], int], wait: Callable[[int], int] = int
) -> tuple[int, Held]:
    """The grant that a lane takes next, `NONE` if it gets none; and the tickets that it holds then.

    Args:
        held: The tickets that it holds.
        lookahead: How many it holds as long as it takes some ahead.
        take: Takes out a ticket, ahead or now.
        wait: Waits for the grant of a ticket that is not decided yet.
    """
    if held is not None:
        first, *rest = *held, *map(take, itertools.repeat(True, 1 if held else lookahead + 1))
        grant = first if first > PENDING else wait(first)
        if grant != NONE:
            return grant, tuple(rest)
    now = take(False)  # those still held are refused, too
    return now if now > PENDING else wait(now), None
