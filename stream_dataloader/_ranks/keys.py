"""What ranks write to the store: the keys, under a prefix of each epoch's own, and the values.

Some things each rank *counts itself in*, and whoever makes the count full says so to all: the count lies under the
name of the thing, what each rank has counted under that and its number, and `all/` marks a full count.

========== ============== ==========================================================================================
beginning  `TERMS`        what rank 0 is about to read
           `HERE`         counted: ranks that have come
           `DIFFERS`      an error: what a rank has that rank 0 has not
           `READY`        all are there; if it is an error, the epoch does not begin
           `BEGUN`        counted: ranks that have read `READY`
steps      `TAIL`, `LAST` the steps where the first rank and the last one ended
           `ENDED`        of each rank: where it ended
           `END`          counted: ranks that have ended
           `has(step)`    yes, no or an error: whether a rank has data for a step (`"drop"`: each has)
           `have(step)`   counted: ranks that have data for a step, for `"drop"`
           `AT`           of each rank: how far it is; that it moves shows that it lives
           `LAYOUT`       what items are like
leaving    `OVER`         counted: ranks that know of the epoch's end
           `LEFT`         of each rank: the error why it left before
========== ============== ==========================================================================================

Before an epoch has a prefix, ranks meet under one that all of them know: `CALL`, `CALLS`, `answer`, `STARTS`.
"""

from __future__ import annotations

import json

from stream_dataloader.errors import RankError

TERMS = "terms"
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
    """Whether there is data for a step."""
    return f"has/{step}"


def have(step: int) -> str:
    """Counted: the ranks that have data for a step."""
    return f"have{step}"


def answer(nonce: str) -> str:
    """The prefix of the epoch to which a call is invited."""
    return f"answer/{nonce}"


#: Values where there is nothing else to say; not empty, as the store takes an empty one for one that was not set.
YES, NO = "yes", "no"


def pack(error: RankError) -> str:
    """An error as a value."""
    return json.dumps([str(error), list(error.ranks)])


def checked(value: str) -> str:
    """A value that is no error; the error, if `pack` made the value of one, is raised."""
    if value.startswith("["):
        raise RankError(*json.loads(value))
    return value
