"""The examples run, and print what they promise."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from helpers import PATIENCE, ROOT, run_program
from lerobot_data import write_v3
from rank_processes import free_port

from stream_dataloader import stores

# warnings are errors, but for those that pyproject.toml lets pass
STRICT = ["error", "ignore:This DataLoader will create:UserWarning", "ignore:This process:DeprecationWarning"]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(programs):
    """Runs an example, warnings being errors: what it prints."""

    def run_example(name, *arguments, cache="/nowhere"):
        done = programs(EXAMPLES / name, *arguments, flags=STRICT, XDG_CACHE_HOME=str(cache))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_example


def lane_texts(output):
    """What each lane printed, batch after batch, and how many batches there were."""
    texts = {}
    for lane, text in re.findall(r"^  lane (\d+) \(worker \d+\): (.*)$", output, re.MULTILINE):
        texts.setdefault(int(lane), []).append(text)
    return texts, len(re.findall(r"^batch \d+$", output, re.MULTILINE))


def test_text_goes_on_from_batch_to_batch_in_each_lane(run, tmp_path):
    paragraphs = [f"{chr(ord('a') + i)}{'.' * (5 + 7 * i)}{i}" for i in range(20)]
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(paragraphs))
    texts, batches = lane_texts(run("text.py", file, "--lanes", 3, "--time-steps", 16, "--batches", 1000))
    assert sorted(texts) == [0, 1, 2]
    read = []
    for windows in texts.values():
        assert len(windows) == batches
        assert all(len(window.replace("»", "")) == 16 for window in windows[:-6])  # later windows may be padded
        first, *rest = "".join(windows).split("»")
        assert first == ""  # a lane starts with a paragraph
        read += rest
    assert sorted(read) == paragraphs  # each once, whole, with nothing of another in between


@pytest.mark.slow
def test_text_defaults_to_the_python_documentation(run):
    texts, batches = lane_texts(run("text.py"))
    assert batches == 6
    assert sorted(texts) == [0, 1, 2, 3]
    assert any("»" in window[1:] for windows in texts.values() for window in windows)


@pytest.mark.parametrize("units", [pytest.param("characters", marks=pytest.mark.slow), "bytes"])
def test_text_files_print_inputs_and_targets(run, tmp_path, units):
    contents = ["".join(chr(ord("a") + i % 26) for i in range(n)) for n in (400, 333)]
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    options = ("--units", units, "--section-bytes", 100, "--batches", 1000, "--time-steps", 7)
    output = run("text_files.py", *files, *options)
    pairs = re.findall(r"input  (.*)\n +target (.*)$", output, re.MULTILINE)
    assert all(text[1:] == target[: len(text) - 1] for text, target in pairs)
    assert sum(len(text) for text, _ in pairs) == 400 + 333
    assert sum(len(target) for _, target in pairs) == 400 + 333 - 8  # the last of a section has none
    assert ("torch.uint8" if units == "bytes" else "torch.int64") in output
    assert "batch 3" in run("text_files.py")


@pytest.mark.slow
def test_video_prints_shapes_and_resets(run, tmp_path):
    output = run("video.py", cache=tmp_path)
    batches = re.findall(r"^batch \d+: (.*) torch.uint8, reset \[(.*?)\] ?(.*)$", output, re.MULTILINE)
    assert {shape for shape, _, _ in batches} == {"(8, 4, 3, 120, 160)"}
    started = [name for _, _, names in batches for name in names.split()]
    assert sorted(started) == sorted(path.name for path in tmp_path.rglob("*.mp4"))
    assert sum(reset.count("1") for _, reset, _ in batches) == len(started) == 12
    assert re.search(r"^862 frames of 12 videos, 0 of them skipped$", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_per_worker_rnn_learns(run, workers):
    output = run("per_worker_rnn.py", "--workers", workers, "--steps", 60)
    for worker in range(max(1, workers)):
        losses = [float(x) for x in re.findall(rf"^step +\d+, worker {worker}: loss (.*)$", output, re.MULTILINE)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.85 * losses[0]


@pytest.mark.slow
def test_a_robot_policy_with_carried_state_remembers(run):
    won = re.findall(r"(\d+)% of", run("robot_policy.py"))
    assert len(won) == 3
    assert max(map(int, won[:2])) < 70
    assert int(won[2]) > 90


@pytest.mark.slow
def test_a_recogniser_with_carried_state_knows_the_speaker(run):
    anew, carried = map(int, re.findall(r"(\d+)% of", run("speech.py", "--workers", 0)))
    assert carried > 90 > 70 > anew


@pytest.mark.parametrize("names", ["lerobot", "libero"])
def test_a_robot_policy_reads_data_by_the_names_of_others(run, tmp_path, names):
    if names == "lerobot":
        write_v3(tmp_path / names, (40, 25), cameras=())
    else:
        obs = {name: np.ones(3) for name in ("ee_states", "gripper_states", "joint_states")}
        demo = [{"obs": obs, "actions": np.ones(7)}] * 20
        stores.pack(([demo, demo], iter), tmp_path / names)
    output = run("robot_policy.py", "--data", tmp_path / names, "--names", names, "--epochs", 1, "--workers", 0)
    assert len(re.findall(r"loss \d\.\d+$", output, re.MULTILINE)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_event_camera_learns_from_whole_batches_and_from_parts(run, workers):
    output = run("event_camera.py", "--workers", workers, "--epochs", 3)
    whole, parts = (text.splitlines() for text in output.split("whole batches, one state:\n")[1].split("parts, ")[:2])
    for lines, lanes, owners in (whole, 8, 1), (parts, 8 // max(1, workers), max(1, workers)):
        seen = [re.findall(r"voxels \((.*)\), .* grids, reset \[(.*)\]", line) for line in lines if " step " in line]
        assert {shape for ((shape, _),) in seen} == {f"10, {lanes}, 3, 24, 32"}
        assert len(seen) == 3 * owners
        assert {resets for ((_, resets),) in seen[:owners]} == {", ".join("1" * lanes)}
        epochs = re.findall(r"epoch \d: (.*) pixels off, (\d+) labels", "\n".join(lines))
        assert len({labels for _, labels in epochs}) == 1  # each once an epoch
        assert float(epochs[-1][0]) < 0.75 * float(epochs[0][0])
    assert "worker 1: voxels" in "".join(parts) or workers == 0


def test_event_camera_voxel_grids_hold_all_events_and_labels(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "event_camera.py"))
    paths = example["write_recordings"](tmp_path, 3)
    for path in paths:
        events, boxes = np.load(path), np.load(path.replace("_td", "_bbox"))
        windows = list(example["open_recording"](path))
        voxels, centre, labelled = (
            np.concatenate([w[key] for w in windows]) for key in ("voxels", "centre", "labelled")
        )
        expected = np.zeros_like(voxels)
        for x, y, p, t in events.tolist():
            later, left = np.modf(t % 50_000 / 50_000 * 2)
            expected[t // 50_000, int(left) : int(left) + 2, y, x] += (2 * p - 1) * np.array([1 - later, later])
        assert np.allclose(voxels, expected, atol=1e-5)
        assert np.flatnonzero(labelled).tolist() == [-(-t // 50_000) - 1 for t in boxes["t"].tolist()]
        assert np.allclose(centre[labelled][:, 0], boxes["x"] + boxes["w"] / 2)
        rest = list(example["open_recording"](path, start=1))
        assert len(rest) == len(windows) - 1
        assert all(np.array_equal(a["voxels"], b["voxels"]) for a, b in zip(rest, windows[1:], strict=True))


@pytest.mark.slow
def test_cameras_are_read_side_by_side(run):
    output = run("camera.py", "--batches", 3)
    assert len(re.findall(r"^batch \d+: \(5, 2, 3, 60, 80\), dropped", output, re.MULTILINE)) == 3


@pytest.mark.slow
def test_ddp_goes_on_with_two_ranks_where_four_stopped(tmp_path):
    def train(ranks, folder, *arguments):
        output = run_program(EXAMPLES / "ddp_torchrun.py", "--checkpoint", tmp_path / folder, *arguments, ranks=ranks)
        (parameters,) = set(re.findall(r"parameters sum to (.*)$", output, re.MULTILINE)) or {""}  # on all ranks
        return re.findall(r"^batch .*$", output, re.MULTILINE), parameters

    four, parameters = train(4, "none")
    two, _ = train(2, "none")
    assert len(four) > 40
    # sums of losses are rounded in another order
    assert [re.sub("loss .*?,", "", line) for line in two] == [re.sub("loss .*?,", "", line) for line in four]
    head, _ = train(4, "saved", "--stop-after", 5)
    tail, resumed = train(2, "saved")
    assert head == four[:5]
    assert [line.split("global")[1] for line in tail] == [line.split("global")[1] for line in four[5:]]
    assert float(resumed) == pytest.approx(float(parameters), abs=1e-3)


def train_with_deaths(folder, rendezvous, deaths):
    """The last line of each batch, those that came before and differ, and what the parameters sum to."""
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", 2, "--max-restarts", 2]
    command += [EXAMPLES / "ddp_torchrun.py", "--save-every", 4, "--checkpoint", folder]
    environment, lines, left = os.environ | {"OMP_NUM_THREADS": "1"}, [], list(enumerate(deaths))
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment) as agent:
        for line in agent.stdout:
            lines.append(line.strip())
            if left and line.startswith(f"batch {left[0][1]}:"):
                kill_rank(agent.pid, left.pop(0)[0])
        assert agent.wait(PATIENCE) == 0
    assert not left
    told = [line for line in lines if line.startswith("batch")]
    batches = {line.split(":")[0]: line for line in told}
    differing = [line for line in told if batches[line.split(":")[0]] != line]
    return batches, differing, {line.split("parameters")[1] for line in lines if "parameters" in line}


def kill_rank(agent, rank):
    """Kill a rank as the kernel would, once its agent has started it: what it printed before may be read late."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for process in psutil.Process(agent).children():
            with contextlib.suppress(psutil.Error):  # it ends meanwhile
                if process.environ().get("RANK") == str(rank):
                    process.kill()
                    return
        time.sleep(0.05)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.slow
def test_ddp_goes_on_after_deaths_where_torchrun_starts_ranks_again(tmp_path):
    whole = train_with_deaths(tmp_path / "whole", ["--standalone"], [])
    assert len(whole[0]) > 40
    for backend, *where in [
        ("standalone", "--standalone"),
        ("static", "--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", free_port()),
        ("c10d", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    ]:
        assert train_with_deaths(tmp_path / backend, where, [6, 17]) == whole, backend


@pytest.mark.slow
def test_a_watched_folder_is_read_whole(run):
    """Recordings that are written meanwhile are read in later passes, again and again."""
    output = run("watch_folder.py", "--batches", 60)
    assert re.search(r"^read 10 of 10 recordings, each at least [1-9]\d* times$", output, re.MULTILINE)
    assert output.startswith("batch 0: 4 recordings")


def right_of(output):
    return int(re.search(r"both colours right in (\d+)% of 100 unseen episodes", output)[1])


@pytest.mark.slow
def test_a_policy_with_a_bank_of_key_frames_remembers(run, tmp_path):
    """And goes on from a checkpoint of two ranks as one."""
    assert right_of(run("robot_memory.py", "--memory", "none")) < 60
    file = tmp_path / "checkpoint"
    run_program(EXAMPLES / "robot_memory.py", "--checkpoint", file, "--batches", 50, ranks=2)
    assert right_of(run("robot_memory.py", "--checkpoint", file, "--batches", 200)) > 95
