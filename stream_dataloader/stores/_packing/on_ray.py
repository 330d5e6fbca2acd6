"""`pack` on a Ray cluster: each task packs a part of the store, and the parts are joined.

Guarantees: parts that are complete are not packed again, whether a task died or `pack` was interrupted. The store's
index is written last.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stream_dataloader._engine.memory.pickling import dumps, for_other_machine
from stream_dataloader._engine.options import integer
from stream_dataloader._engine.remote.pool import check_initialized
from stream_dataloader._engine.remote.worker import check_version, library_version, unpickled
from stream_dataloader.errors import ErrorReport, StoreError, WorkerDeathError
from stream_dataloader.stores._base.files import plain_path
from stream_dataloader.stores._base.formats import format_at
from stream_dataloader.stores._packing.join import join, names_of_parts
from stream_dataloader.stores._packing.run import Bar, PackReport
from stream_dataloader.stores._packing.share import NOTE, Share
from stream_dataloader.streams.cache import FileCache, is_url

__all__ = ["pack_on_ray"]

_PARTS_A_WORKER = 4  # so that a slow part, or a task that died, holds up the others less
_CANCEL_SECONDS = 20.0

#: The outcome of a task: its host, the report or an error, and errors of skipped streams.
Outcome = tuple[str, PackReport | ErrorReport, list[ErrorReport]]


def pack_on_ray(
    pack: Callable[..., PackReport],
    call: Mapping[str, Any],
    sources: int,
    num_workers: int,
    ray_remote_args: Mapping[str, Any] | None,
) -> PackReport:
    """Pack a store by tasks of Ray.

    Args:
        pack: Packs a part.
        call: Its arguments, other than the part.
        sources: Number of sources.
    """
    check_initialized()
    import ray

    began, progress = time.perf_counter(), call["progress"]
    target, cache = plain_path(call["path"]), FileCache(storage_options=call["storage_options"] or {})
    if format_at(target, (lambda index: cache.remote(index).ask()) if is_url(target) else os.stat) is not None:
        raise FileExistsError(f"{target} exists, and pack overwrites nothing; delete it first")
    workers = integer('num_workers, with worker_method="ray",', num_workers, 1)
    begun = names_of_parts(target, cache)  # by an earlier call, maybe with another number of workers
    parts = int(begun[0].partition("-of-")[2]) if begun else max(1, min(_PARTS_A_WORKER * workers, sources))
    with for_other_machine():
        pickled = ray.put(dumps({**call, "progress": False}))
    run = ray.remote(**{"num_cpus": 1, **(ray_remote_args or {})})(_pack_part)
    packing: dict[Any, Share] = {}
    reports: list[PackReport] = []
    done, left = 0, [Share(number, parts) for number in reversed(range(parts))]
    bar = Bar.of(target, sources, progress)
    try:
        while left or packing:
            while left and len(packing) < workers:
                share = left.pop()
                packing[run.remote(library_version(), pack, pickled, share)] = share
            (task, *_), _ = ray.wait(list(packing), num_returns=1)
            reports.append(report := _report_of(task, packing.pop(task), target))
            done += report.streams + len(report.skipped)
            bar.update(report.streams + len(report.skipped))
            if callable(progress):
                progress(done, sources)
    finally:
        bar.close()
        for task in packing:  # after an error or Ctrl-C; parts keep the streams that they have packed
            ray.cancel(task)
        if packing:
            ray.wait(list(packing), num_returns=len(packing), timeout=_CANCEL_SECONDS)
    skipped = sorted((error for report in reports for error in report.skipped), key=lambda error: error.source_index)
    if skipped and not any(report.streams for report in reports):
        raise StoreError(f"none of {sources} streams could be packed; {skipped[0]}") from skipped[0]
    info = join(target, storage_options=call["storage_options"])
    return PackReport(
        path=target,
        format=call["format"],
        streams=info.streams,
        steps=sum(report.steps for report in reports),
        bytes=sum(report.bytes for report in reports),
        seconds=time.perf_counter() - began,
        packed_before=sum(report.packed_before for report in reports),
        skipped=tuple(skipped),
    )


def _pack_part(version: str, pack: Callable[..., PackReport], pickled: bytes, share: Share) -> Outcome:
    """Pack a part, as a task. Errors are results, as Ray would lose what they hold."""
    host = socket.gethostname()
    try:
        check_version(version, host)
        report = pack(**unpickled(pickled, host), part=share)
    except Exception as error:
        return host, ErrorReport(error), []
    return host, replace(report, skipped=()), [ErrorReport(error) for error in report.skipped]


def _report_of(task: Any, share: Share, target: str) -> PackReport:
    """Return the report of a task that has ended; raise its error."""
    import ray

    try:
        outcome: Outcome = ray.get(task)
    except ray.exceptions.RayError as error:
        raise WorkerDeathError(
            f"the tasks that packed part {tuple(share)} of {target} died, the last one with: {error}. Pack again, and "
            "only what is unfinished is packed"
        ) from error
    host, report, skipped = outcome
    if isinstance(report, ErrorReport):
        raise report.unpack()
    if not is_url(target) and not os.path.exists(os.path.join(target, share.folder, NOTE)):
        raise StoreError(
            f"node {host} has packed part {tuple(share)} into {target}, and it is not there on this machine; give a "
            "folder that all nodes see under this path, or a URL"
        )
    return replace(report, skipped=tuple(one.unpack() for one in skipped))  # type: ignore[misc]
