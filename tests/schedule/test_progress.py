"""`Progress`: what is saved follows what was delivered."""

from stream_dataloader import StreamDataset
from stream_dataloader._schedule.snapshot import LaneReports, LaneState, Progress, pack_progress


def reports(*taken):
    return LaneReports(taken, pack_progress([LaneState().progress]), {})


def test_grants_that_others_took_and_did_not_deliver_are_saved_to_be_given_again():
    """First come, first served: the worker of lane 0 took grants 0 and 2, and its part has not come."""
    rules = StreamDataset(range(9), iter, 2, time_steps=1, deterministic=False).rules
    progress = Progress(rules, 0, None, parts=2)
    progress.advance([reports(), reports((1, 1), (1, 3))])
    assert progress.last.unpack(rules).returned == (0, 2)
    assert progress.last.cursors == (4,)
    progress.advance([reports((0, 0)), reports()])
    assert progress.last.unpack(rules).returned == (2,)
