"""The recipe of the guide on map-style datasets runs with mmengine, the real package, and goes on where it stopped."""

import importlib.util
import re

import pytest
from helpers import ROOT, run_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mmengine") is None, reason="needs mmengine"),
]


def test_both_loops_go_on_at_the_next_batch(tmp_path):
    # mmengine's checkpoints hold classes of its own, which torch has not loaded since 2.6
    environment = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    script = ROOT / "tests" / "trainers" / "mmengine_lanes.py"
    output = run_program(script, tmp_path, folder=tmp_path, **environment)
    assert len(re.findall(" ok$", output, re.MULTILINE)) == 4
