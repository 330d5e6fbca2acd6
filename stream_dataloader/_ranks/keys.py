"""What ranks write to the store: the keys, under a prefix of each epoch's own, and the values.

Some things each rank *counts itself in*, and whoever makes the count full says so to all: the count lies under the
name of the thing, what each rank has counted under that and its number, and `all/` marks a full count.

========== ============== ==========================================================================================
beginning  `TERMS`        what rank 0 is about to read
           `HERE`         counted: ranks that have come
           `DIFFERS`      a `Reason`: what a rank has that rank 0 has not
           `READY`        all are there; with a `Reason`, the epoch does not begin
           `BEGUN`        counted: ranks that have read `READY`
steps      `TAIL`, `LAST` the steps where the first rank and the last one ended
           `ENDED`        of each rank: where it ended
           `END`          counted: ranks that have ended
           `has(step)`    an `Answer`: whether a rank has data for a step (`"drop"`: whether each has)
           `have(step)`   counted: ranks that have data for a step, for `"drop"`
           `AT`           of each rank: how far it is; that it moves shows that it lives
           `LAYOUT`       what items are like
leaving    `OVER`         counted: ranks that know of the epoch's end
           `LEFT`         of each rank: the `Reason` why it left before
========== ============== ==========================================================================================

Before an epoch has a prefix, ranks meet under one that all of them know: `CALL`, `CALLS`, `answer`, `STARTS`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

TERMS = "told/0"
HERE = "here"
DIFFERS = "differs"
READY = "ready"
BEGUN = "begun"
TAIL = "tail"
LAST = "last"
ENDED = "ended"
END = "end"
AT = "at"
LAYOUT = "layout"
OVER = "over"
LEFT = "left"

#: Of each rank: its calls that are not answered.
CALL = "call"
#: How often any rank has changed its calls.
CALLS = "calls"
#: Of each rank: how often its processes were started, where several are one rank.
STARTS = "starts"


def of_rank(what: str, rank: int) -> str:
    """What is a rank's own."""
    return f"{what}/{rank}"


def all_of(counted: str) -> str:
    """Set once all ranks have counted themselves in something."""
    return f"all/{counted}"


def has(step: int) -> str:
    """Whether there is data for a step: an `Answer`."""
    return f"has/{step}"


def have(step: int) -> str:
    """Counted: the ranks that have data for a step."""
    return f"have{step}"


def answer(nonce: str) -> str:
    """The prefix of the epoch to which a call is invited."""
    return f"answer/{nonce}"


#: Instead of a `Reason`, where there is none; not empty, as the store takes an empty value for one that was not set.
NO_REASON = "null"


class Reason(NamedTuple):
    """Why an epoch does not begin or go on; the arguments of a `RankError`.

    Attributes:
        text: The error's message.
        ranks: The ranks that it is about.
    """

    text: str
    ranks: Sequence[int]

    def pack(self) -> str:
        """A value of the store."""
        return json.dumps(self)

    @classmethod
    def unpack(cls, value: str) -> Reason:
        """What `pack` made."""
        return cls(*json.loads(value))


class Answer(NamedTuple):
    """Whether there is data for a step.

    Attributes:
        has_data: There is.
        reason: Why there will be no answer.
    """

    has_data: bool
    reason: Reason | None = None

    def pack(self) -> str:
        """A value of the store."""
        return json.dumps(self)

    @classmethod
    def unpack(cls, value: str) -> Answer:
        """What `pack` made."""
        has_data, reason = json.loads(value)
        return cls(has_data, None if reason is None else Reason(*reason))
