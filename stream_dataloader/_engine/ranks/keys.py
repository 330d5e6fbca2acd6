"""Keys and values that ranks write to the store; each epoch has a prefix of its own.

Some keys are counted: each rank *counts itself in* once, and `all/` marks a full count.
"""

from __future__ import annotations

import json

from stream_dataloader.errors import RankError

# The beginning of an epoch
TERMS = "terms"  # the epoch and options that rank 0 is about to read with
HERE = "here"  # counted: ranks that have arrived
DIFFERS = "differs"  # an error: the first difference of a rank from rank 0
TOLD = "told"  # of each rank: a value for all; without a rank: the list of these values
READY = "ready"  # all have arrived; if it is an error, the epoch does not begin
BEGUN = "begun"  # counted: ranks that have read `READY`

# The steps of an epoch
TAIL = "tail"  # the step where the first rank ended
LAST = "last"  # the step where the last rank ended
ENDED = "ended"  # of each rank: the step where it ended
END = "end"  # counted: ranks that have ended
AT = "at"  # of each rank: its current step; a change shows that the rank is alive
LAYOUT = "layout"  # the layout of items

# The end of an epoch
OVER = "over"  # counted: ranks that know of the end
LEFT = "left"  # of each rank: the error with which it left early

# Before the epoch has a prefix, under a prefix that all ranks know
CALL = "call"  # of each rank: its calls that are not answered yet
CALLS = "calls"  # how often any rank has changed its calls


def of_rank(what: str, rank: int) -> str:
    """Return the key of one rank."""
    return f"{what}/{rank}"


def all_of(counted: str) -> str:
    """Return the key that is set once all ranks have counted themselves in."""
    return f"all/{counted}"


def has(step: int) -> str:
    """Return the key that says whether a rank has data for a step; with `"drop"`, whether every rank has."""
    return f"has/{step}"


def have(step: int) -> str:
    """Return the counted key of the ranks that have data for a step."""
    return f"have{step}"


def answer(nonce: str) -> str:
    """Return the key of the answer to a call; its value is the epoch's prefix."""
    return f"answer/{nonce}"


#: Values of plain flags. They are not empty, because the store treats an empty value as unset.
YES, NO = "yes", "no"


def pack(error: RankError) -> str:
    """Return an error as a value."""
    return json.dumps([str(error), list(error.ranks)])


def checked(value: str) -> str:
    """Return a value; if `pack` made it from an error, raise that error."""
    if value.startswith("["):
        raise RankError(*json.loads(value))
    return value
