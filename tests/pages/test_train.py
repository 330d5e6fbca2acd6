"""The example to copy trains, and ends with the same weights when it is stopped in the middle and run again."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from helpers import PATIENCE, ROOT

EXAMPLE = ROOT / "examples" / "train.py"
FLAGS = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
LAUNCHERS = {1: [], 2: ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
TEXT = ["--text", "--epochs", "2", "--workers", "1"]


def start(folder, *arguments, ranks=1):
    """Start the example in a folder; it prints to a pipe."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *FLAGS, *LAUNCHERS[ranks], EXAMPLE, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes)


def run(folder, *arguments, ranks=1):
    """Run the example to its end: the losses it prints, and its last checkpoint."""
    with start(folder, *arguments, ranks=ranks) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return losses_of(output), torch.load(folder / "runs" / "train" / "checkpoint.pt", weights_only=True)


def losses_of(output):
    return re.findall(r"^step \d+: .*$", output, re.MULTILINE)


def interrupt(folder, number, *arguments, ranks=1, after="step 20: training"):
    """Send a signal once the example has printed a line; return the losses until then, and what it says at its end."""
    with start(folder, *arguments, ranks=ranks) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(after):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        if number == signal.SIGKILL:
            for one in family:
                if "train.py" in " ".join(one.cmdline()):
                    one.kill()
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    return losses_of("".join(lines) + output), errors


def check_same(resumed, whole):
    losses, saved = resumed
    assert losses
    assert losses == whole[0][-len(losses) :]
    assert saved["step"] == whole[1]["step"]
    different = [name for name, value in whole[1]["model"].items() if not torch.equal(value, saved["model"][name])]
    assert different == []


def test_the_file_to_copy_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "ranks"), [([], 1), (TEXT, 1), (TEXT, 2)], ids=["video", "text", "torchrun"])
def test_a_run_that_is_stopped_and_run_again_ends_like_one_that_is_not(tmp_path, arguments, ranks):
    whole = run(tmp_path / "whole", *arguments, ranks=ranks)
    first, *_, last = [float(line.split()[-1]) for line in whole[0] if "validation" in line]
    assert last < first

    before, _ = interrupt(tmp_path / "killed", signal.SIGKILL, *arguments, ranks=ranks)
    assert before == whole[0][: len(before)]
    resumed = run(tmp_path / "killed", *arguments, ranks=ranks)
    assert len(resumed[0]) < len(whole[0])
    check_same(resumed, whole)

    before, errors = interrupt(tmp_path / "stopped", signal.SIGINT, *arguments, ranks=ranks)
    stopped = {int(step) for step in re.findall(r"stopped after step (\d+)", errors)}
    assert len(stopped) == 1, errors
    *before, last = before
    assert before == whole[0][: len(before)]
    assert last.startswith(f"step {stopped.pop()}: training")
    check_same(run(tmp_path / "stopped", *arguments, ranks=ranks), whole)


@pytest.mark.slow
def test_checkpoints_at_each_step_resume_also_at_the_end_of_an_epoch(tmp_path):
    arguments = ["--text", "--epochs", "1", "--save-every", "1", "--workers", "0"]
    whole = run(tmp_path / "whole", *arguments)
    for number, after in enumerate(("step 1: training", "step 58: training", whole[0][-2])):
        interrupt(tmp_path / str(number), signal.SIGKILL, *arguments, after=after)
        check_same(run(tmp_path / str(number), *arguments), whole)
    assert run(tmp_path / "whole", *arguments)[0] == []  # it is done


WITH_TENSORBOARD = """
import importlib.machinery, runpy, sys, types

class SummaryWriter:
    def __init__(self, folder, purge_step):
        print("board", folder, purge_step)

    def add_scalar(self, name, value, step):
        print("scalar", name, round(value, 6), step)

for name in ("tensorboard", "torch.utils.tensorboard"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__, module.SummaryWriter = importlib.machinery.ModuleSpec(name, None), SummaryWriter
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_losses_go_to_tensorboard_where_that_is_installed(tmp_path, programs):
    arguments = (EXAMPLE, "--text", "--epochs", 1, "--workers", 0, "--folder", tmp_path / "run")
    done = programs(WITH_TENSORBOARD, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"board {tmp_path / 'run'} 1\n" in done.stdout
    printed = [(name, float(loss)) for name, loss in re.findall(r"^step \d+: (\w+) loss (.*)$", done.stdout, re.M)]
    drawn = [(name, float(loss)) for name, loss in re.findall(r"^scalar loss/(\w+) (\S+)", done.stdout, re.M)]
    assert drawn == printed
    assert len(drawn) == 3
