"""What ranks write to the store: the keys, under a prefix of each epoch's own, and the values.

Ranks *count themselves in* some things: `all/` marks a full count.
"""

from __future__ import annotations

import json

from stream_dataloader.errors import RankError

# an epoch's beginning
TERMS = "terms"  # what rank 0 is about to read
HERE = "here"  # counted: ranks that have come
DIFFERS = "differs"  # an error: what a rank has that rank 0 has not
READY = "ready"  # all are there; if it is an error, the epoch does not begin
BEGUN = "begun"  # counted: ranks that have read `READY`

# its steps
TAIL = "tail"  # the step where the first rank ended
LAST = "last"  # and the last one
ENDED = "ended"  # of each rank: where it ended
END = "end"  # counted: ranks that have ended
AT = "at"  # of each rank: how far it is; that it moves shows that it lives
LAYOUT = "layout"  # what items are like

# its end
OVER = "over"  # counted: ranks that know of it
LEFT = "left"  # of each rank: the error why it left before

# before it has a prefix, under one that all ranks know
CALL = "call"  # of each rank: its calls that are not answered
CALLS = "calls"  # how often any rank has changed its calls


def of_rank(what: str, rank: int) -> str:
    """What is a rank's own."""
    return f"{what}/{rank}"


def all_of(counted: str) -> str:
    """Set once all ranks have counted themselves in something."""
    return f"all/{counted}"


def has(step: int) -> str:
    """Whether a rank has data for a step; for `"drop"`, whether each has."""
    return f"has/{step}"


def have(step: int) -> str:
    """Counted: the ranks that have data for a step."""
    return f"have{step}"


def answer(nonce: str) -> str:
    """The prefix of the epoch to which a call is invited."""
    return f"answer/{nonce}"


#: Where there is nothing else to say; not empty, which the store takes for not set.
YES, NO = "yes", "no"


def pack(error: RankError) -> str:
    """An error as a value."""
    return json.dumps([str(error), list(error.ranks)])


def checked(value: str) -> str:
    """A value that is no error; the error, if `pack` made the value of one, is raised."""
    if value.startswith("["):
        raise RankError(*json.loads(value))
    return value
