"""Where all tests must run, one that is skipped fails.

`STREAM_DATALOADER_MAY_SKIP` is a pattern of what may be skipped: a test's file and name, and the reason. Without it any
test may be, as where a contributor's machine lacks something.
"""

import os
import re

MAY_SKIP = os.environ.get("STREAM_DATALOADER_MAY_SKIP")


def judge_skip(report, may_skip=MAY_SKIP):
    """Have a test, or a file, that was skipped fail if it must run here."""
    if may_skip is None or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2]
    if not re.search(may_skip, f"{report.nodeid}: {reason}"):
        report.outcome, report.longrepr = "failed", f"{report.nodeid} must run here, and was skipped: {reason}"
