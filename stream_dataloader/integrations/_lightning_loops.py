"""What a checkpoint of Lightning says of the run: pure functions over the counters of its loops.

Lightning counts an event four times: ready, started, processed, completed. Callbacks save anywhere between::

    epoch    ready ─ on_train_epoch_start ─ started ─ batches, validation ─ processed ─ on_train_epoch_end ─ completed
    batch    ready ─ on_train_batch_start ─ started ─ training_step ─ processed ─ on_train_batch_end ─ completed

Its own rules for going on lose a validation, a batch or an epoch at some of these points, and differ between versions.
So the counters are first made to say one of three things, which all versions take up alike: within an epoch, at the end
of one that is still to be validated and ended, or between two.
"""

from __future__ import annotations

import copy
import enum
from typing import Any, NamedTuple


class Stage(enum.Enum):
    """Where in an epoch a checkpoint was saved."""

    WITHIN = "some of its batches are trained on"
    AT_END = "all of them are; its validation and end are not done, or not all"
    BETWEEN = "it has not begun"


class Standing(NamedTuple):
    """Where a run stood when it was saved.

    Attributes:
        stage: Where in the epoch.
        epoch: Lightning's number of it.
        batches: Number of its batches trained on.
        in_batch_end: It was saved in `on_train_batch_end`, so that the step was not counted for loggers.
        unvalidated: A validation that may be due after the last batch has not begun, or not ended.
    """

    stage: Stage
    epoch: int
    batches: int
    in_batch_end: bool = False
    unvalidated: bool = False


def standing_of(loop: dict[str, Any]) -> Standing:
    """Where a run stood, by the fit loop's part of a checkpoint."""
    epoch, batch = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
    is_last = loop["epoch_loop.batch_progress"]["is_last_batch"] and batch["processed"] == batch["ready"]
    in_batch_end = batch["completed"] < batch["processed"]
    unvalidated = in_batch_end or not _is_over(loop["epoch_loop.val_loop.batch_progress"])
    if epoch["processed"] == epoch["started"]:
        cut = epoch["ready"] == epoch["started"] > 0 and not is_last and batch["processed"] > 0
        if not cut:
            return Standing(Stage.BETWEEN, epoch["processed"], 0)
        # max_steps, or a callback that stops, ended the run within the epoch, which Lightning counts as done
        return Standing(Stage.WITHIN, epoch["processed"] - 1, batch["processed"], in_batch_end, unvalidated)
    if is_last:
        return Standing(Stage.AT_END, epoch["processed"], batch["processed"], in_batch_end, unvalidated)
    if batch["processed"] == 0:
        return Standing(Stage.BETWEEN, epoch["processed"], 0)
    return Standing(Stage.WITHIN, epoch["processed"], batch["processed"], in_batch_end, unvalidated)


def taken_up(loop: dict[str, Any], standing: Standing) -> dict[str, Any]:
    """A copy of that part, without loaders' states, and with counters that Lightning takes up as they were meant."""
    loop = copy.deepcopy(
        {**loop, "state_dict": {k: v for k, v in loop["state_dict"].items() if k != "combined_loader"}}
    )
    epoch, batch = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    done = epoch["total"]["processed"] - (epoch["current"]["processed"] - standing.epoch)
    is_open = standing.stage is not Stage.BETWEEN
    _count(epoch["current"], standing.epoch, is_open)
    _count(epoch["total"], done, is_open)
    _count(batch["current"], standing.batches, False)
    _count(batch["total"], batch["total"]["processed"], False)
    batch["is_last_batch"] = standing.stage is Stage.AT_END
    if standing.unvalidated:  # as if a validation had just begun: Lightning looks at it only where one is due
        validation = loop["epoch_loop.val_loop.batch_progress"]
        _count(validation["total"], validation["total"]["completed"], True)
        _count(validation["current"], 0, True)
        validation["is_last_batch"] = False
    return loop


def _is_over(validation: dict[str, Any]) -> bool:
    current = validation["current"]
    return bool(validation["is_last_batch"]) and current["completed"] == current["ready"]


def _count(counter: dict[str, int], done: int, is_open: bool) -> None:
    """Have a counter say that some events are done, and one more is begun."""
    counter.update(ready=done + is_open, started=done + is_open, processed=done, completed=done)
