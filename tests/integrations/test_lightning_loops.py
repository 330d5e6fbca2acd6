"""What a checkpoint of Lightning says, and how its counters are made to say it: pure functions over plain numbers."""

import copy

import pytest

pytest.importorskip("lightning.pytorch")  # the room needs it, though not these functions

from stream_dataloader.integrations._lightning_places import LoopProgress, Stage, progress_of, taken_up


def counter(ready, started, processed, completed):
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}


def progress(current, before=0):
    """A counter of this epoch, and one of all epochs, of which `before` were counted earlier."""
    return {"current": counter(*current), "total": counter(*[n + before for n in current])}


def loop(epoch, batch, *, last=False, validation=(2, 2, 2, 2), validated=True):
    return {
        "epoch_progress": progress(epoch),
        "epoch_loop.batch_progress": {**progress(batch, 10), "is_last_batch": last},
        "epoch_loop.val_loop.batch_progress": {**progress(validation, 4), "is_last_batch": validated},
        "state_dict": {"combined_loader": ["a state"], "other": 1},
    }


CASES = {
    "before the first epoch": (loop((0, 0, 0, 0), (0, 0, 0, 0)), LoopProgress(Stage.BETWEEN, 0, 0)),
    "an epoch starts": (loop((3, 2, 2, 2), (5, 5, 5, 5), last=True), LoopProgress(Stage.BETWEEN, 2, 0)),
    "its first batch failed": (loop((3, 3, 2, 2), (1, 1, 0, 0)), LoopProgress(Stage.BETWEEN, 2, 0)),
    "a batch ends": (loop((3, 3, 2, 2), (4, 4, 4, 3)), LoopProgress(Stage.WITHIN, 2, 4, True, True)),
    "a batch failed": (loop((3, 3, 2, 2), (4, 4, 3, 3)), LoopProgress(Stage.WITHIN, 2, 3)),
    "the last batch failed": (loop((3, 3, 2, 2), (5, 5, 4, 4), last=True), LoopProgress(Stage.WITHIN, 2, 4)),
    "the last batch ends": (loop((3, 3, 2, 2), (5, 5, 5, 4), last=True), LoopProgress(Stage.AT_END, 2, 5, True, True)),
    "a validation ended": (loop((3, 3, 2, 2), (5, 5, 5, 5), last=True), LoopProgress(Stage.AT_END, 2, 5)),
    "a validation failed": (
        loop((3, 3, 2, 2), (5, 5, 5, 5), last=True, validation=(1, 1, 0, 0), validated=False),
        LoopProgress(Stage.AT_END, 2, 5, False, True),
    ),
    "an epoch ends": (loop((3, 3, 3, 2), (5, 5, 5, 5), last=True), LoopProgress(Stage.BETWEEN, 3, 0)),
    "max_steps ended it": (loop((3, 3, 3, 2), (2, 2, 2, 2)), LoopProgress(Stage.WITHIN, 2, 2)),
}


@pytest.mark.parametrize(("saved", "progress"), CASES.values(), ids=CASES)
def test_a_checkpoint_says_where_the_run_stood(saved, progress):
    assert progress_of(saved) == progress
    before = copy.deepcopy(saved)
    taken = taken_up(saved, progress)
    assert saved == before
    assert taken["state_dict"] == {"other": 1}
    assert progress_of(taken)[:3] == progress[:3]
    epoch, batch = taken["epoch_progress"], taken["epoch_loop.batch_progress"]
    is_open = progress.stage is not Stage.BETWEEN
    for total in (epoch["current"], epoch["total"]):
        assert total == counter(*[progress.epoch + is_open] * 2, *[progress.epoch] * 2)
    assert batch["current"] == counter(*[progress.batches] * 4)
    assert batch["total"] == counter(*[saved["epoch_loop.batch_progress"]["total"]["processed"]] * 4)
    assert batch["is_last_batch"] is (progress.stage is Stage.AT_END)
    validation = taken["epoch_loop.val_loop.batch_progress"]
    assert (validation["current"] == counter(1, 1, 0, 0)) is progress.unvalidated
