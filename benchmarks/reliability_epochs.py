"""Epochs that are left early, again and again, for `reliability`: nothing may be left behind by any of them.

What is counted, before and after: open file descriptors, threads and child processes of this process, and its
memory and that of its workers: what they wrote, shared pages in equal shares, not the libraries' files, whose share
depends on what else runs on the machine (`Pss_Anon` and `Pss_Shmem` of Linux's `smaps_rollup`).
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from reliability_cases import numbers
from reliability_runs import Finding

from stream_dataloader import StreamDataLoader, StreamDataset

#: How workers are started, and how many epochs are left; "persistent" keeps those that were forked.
EPOCHS = {"persistent": 10_000, "fork": 500, "spawn": 20}

_MOST_GROWTH_BYTES = 4 << 20


class Held(NamedTuple):
    """Resources that this process holds."""

    descriptors: int
    threads: int
    children: int
    memory_bytes: int


def held() -> Held:
    """Count it, once what is ending has ended."""
    gc.collect()
    process, deadline = psutil.Process(), time.monotonic() + 5
    while True:
        children = process.children(recursive=True)
        if all(c.status() != psutil.STATUS_ZOMBIE for c in children) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    memory = sum(written_bytes(p.pid) for p in (process, *children))
    return Held(len(os.listdir("/proc/self/fd")), threading.active_count(), len(children), memory)


def written_bytes(pid: int) -> int:
    """Return the memory that a process has written, with shared pages in equal shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def leave_early(how: str, count: int, alive: Callable[[], None]) -> Finding:
    """Leave epochs of a short list after the second batch.

    Args:
        how: One of `EPOCHS`.
        count: How many epochs count, after one in twenty that does not.
        alive: Called after each epoch.

    Raises:
        AssertionError: Something was left behind.
    """
    dataset = StreamDataset([(i, 6) for i in range(8)], numbers, 4, time_steps=2, shuffle=True, seed=0)
    kept = how == "persistent"
    loader = StreamDataLoader(dataset, 2, persistent_workers=kept, multiprocessing_context="fork" if kept else how)
    longest, before = 0.0, held()
    warm_up = max(1, count // 20)
    samples: list[Held] = []
    for epoch in range(warm_up + count):
        if epoch == warm_up:
            before = held()
        begin = time.monotonic()
        for batch in loader:
            if batch.batch_index == 1:
                break
        assert (batch.epoch, batch.batch_index) == (epoch, 1), (
            f"epoch {epoch} gave batch {batch.batch_index} of epoch {batch.epoch}"
        )
        longest = max(longest, time.monotonic() - begin)
        alive()
        if epoch >= warm_up and (epoch - warm_up) % max(1, count // 10) == 0:
            samples.append(held())
    after = held()
    told = f"{how}: before {before}, after {after}, longest {longest:.2f} s, on the way {samples}"
    assert before[:3] == after[:3], told
    assert after.memory_bytes - before.memory_bytes <= _MOST_GROWTH_BYTES, told
    heads = ("descriptors", "threads", "processes")
    cells = {head: f"{one} → {other}" for head, one, other in zip(heads, before, after, strict=False)}
    cells["memory"] = f"{before.memory_bytes / 1e6:.1f} → {after.memory_bytes / 1e6:.1f} MB"
    cells["longest epoch"] = f"{longest:.2f} s"
    figures = {"before": before._asdict(), "after": after._asdict(), "samples": [s._asdict() for s in samples]}
    return Finding(cells, figures={**figures, "longest": longest})
