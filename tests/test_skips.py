"""A test that is skipped where it must run fails."""

from types import SimpleNamespace

import pytest
from skips import judge_skip


def report_of(**more):
    found = {"skipped": True, "nodeid": "tests/a.py::test", "longrepr": ("a.py", 3, "Skipped: needs a GPU")}
    return SimpleNamespace(outcome="skipped", **(found | more))


@pytest.mark.parametrize(
    ("may_skip", "more", "outcome"),
    [
        (None, {}, "skipped"),
        ("a GPU$", {}, "skipped"),
        ("^tests/a.py", {}, "skipped"),
        ("root", {}, "failed"),
        ("root", {"wasxfail": "known"}, "skipped"),
        ("root", {"skipped": False}, "skipped"),
    ],
)
def test_a_skip_is_allowed_by_its_file_or_reason_or_is_a_failure(may_skip, more, outcome):
    report = report_of(**more)
    judge_skip(report, may_skip)
    assert report.outcome == outcome
