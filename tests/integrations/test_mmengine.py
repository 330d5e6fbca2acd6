"""The recipe of the guide on map-style datasets runs with mmengine, the real package, and goes on where it stopped."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mmengine") is None, reason="needs mmengine"),
]


def test_both_loops_go_on_at_the_next_batch(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "trainers" / "mmengine_lanes.py", tmp_path],
        check=False,
        timeout=PATIENCE,
        # mmengine's checkpoints hold classes of its own, which torch has not loaded since 2.6
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(" ok$", done.stdout, re.MULTILINE)) == 4
