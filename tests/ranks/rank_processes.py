"""Ranks as real processes, started once, which run functions together; and what several of them are given to read."""

import contextlib
import itertools
import multiprocessing
import os
import socket
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from cases import Case, keys
from helpers import FULL, PATIENCE
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader

MOST = 8 if FULL else 4
#: Random cases; give more where scheduling, transport or resume change.
EXAMPLES = int(os.environ.get("STREAM_DATALOADER_RANK_EXAMPLES", "20"))
_groups = {}  # in a rank's process: the first n ranks


def group(count):
    """The process group of the first ranks, so many; in a rank's process."""
    return _groups[count]


def _serve(rank, world_size, port, pipe):
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    for count in range(1, world_size + 1):
        _groups[count] = dist.new_group(range(count))
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((function(rank, *args), None))
        except Exception as error:
            pipe.send((None, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Failed(Exception):
    """What a rank raised: its type's name and message."""

    def __init__(self, rank, kind, message, text):
        super().__init__(f"rank {rank}: {kind}: {message}\n{text}")
        self.rank, self.kind, self.message = rank, kind, message


class RankProcesses:
    """So many ranks, to the end of a context; `killed` where some of them may hang by then."""

    def __init__(self, world_size=MOST, *, killed=False):
        self.pipes, self.processes, self._killed = [], [], killed
        context = multiprocessing.get_context("forkserver")  # whose server has imported torch
        port = free_port()
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(context.Process(target=_serve, args=(rank, world_size, port, theirs)))
            self.processes[-1].start()
            self.pipes.append(ours)
            theirs.close()
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE)
            pipe.recv()

    def run(self, world_size, function, *args, patience=PATIENCE, failing=False):
        """What `function(rank, *args)` returns on each of the first ranks, or a `Failed` if that is expected."""
        for pipe in self.pipes[:world_size]:
            pipe.send((function, args))  # by name: it is imported there
        deadline, results = time.monotonic() + patience, []
        for rank, pipe in enumerate(self.pipes[:world_size]):
            assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} hangs"
            value, error = pipe.recv()
            results.append(value if error is None else Failed(rank, *error))
        failed = [result for result in results if isinstance(result, Failed)]
        if failed and not failing:
            raise failed[0]
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(0 if self._killed else 60)
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


@st.composite
def shared_cases(draw, most_groups=8, known=None):
    """A case for the lanes of one group, how many groups there are, and whether lengths are known."""
    groups = draw(st.integers(1, most_groups))
    mode = draw(st.sampled_from(["zeros", "data", "drop"]))
    lanes = draw(st.integers(1, 3))
    least = groups * lanes if mode == "drop" else groups
    lengths = draw(st.lists(st.integers(0, 8), min_size=least, max_size=least + 20))
    case = Case(
        lengths=lengths,
        lanes=lanes,
        time_steps=draw(st.integers(1, 4)),
        windows=draw(st.sampled_from(["aligned", "packed"])),
        padding_mode=mode,
        lookahead=draw(st.integers(0, 2)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 30)),
        mark_ends=draw(st.booleans()),
    )
    return case, groups, draw(st.booleans()) if known is None else known


def world_sizes(groups):
    """How many ranks can share so many groups."""
    return st.sampled_from([size for size in range(1, groups + 1) if groups % size == 0])


def loader_of(case, groups, known, workers=0, *, world_size=1, **options):
    ours = Case(**{**vars(case), "lanes": case.lanes * (groups // world_size)})
    dataset = ours.dataset(lengths=case.lengths) if known else ours.dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than lanes
        if "rank" in options:
            options["world_size"] = world_size
        return StreamDataLoader(dataset, workers, virtual_ranks=groups, **options)


def read(rank, world_size, drawn, workers, state=None, most=None):
    """A rank's batches, from a state on, at most some; and the state after them."""
    options = {"world_size": world_size, "process_group": group(world_size), "timeout": PATIENCE}
    loader = loader_of(*drawn, workers[rank], **options)
    if state is not None:
        loader.load_state_dict(state)
    return keys(itertools.islice(loader, most)), loader.state_dict()


def side_by_side(batches):
    merged = []
    for fields in zip(*batches, strict=True):
        if isinstance(fields[0], int):  # step, epoch
            assert len(set(fields)) == 1
            merged.append(fields[0])
        elif isinstance(fields[0][0], list):  # (T, B, ...)
            merged.append([[cell for row in rows for cell in row] for rows in zip(*fields, strict=True)])
        else:
            merged.append([cell for row in fields for cell in row])
    lanes = len(merged[6]) // len(batches)
    assert merged[6] == list(range(lanes)) * len(batches)
    merged[6] = list(range(len(merged[6])))
    return merged
