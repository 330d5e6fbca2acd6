"""A progress bar over an epoch: exact batches if their number is known, otherwise finished sources.

Guarantee: it iterates over the loader's own iterator.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from stream_dataloader._engine.ranks.own_rank import is_started
from stream_dataloader._engine.ranks.ranks import Ranks
from stream_dataloader._engine.reading.deferred import UntilEnd

__all__ = ["with_progress"]


def _is_first_rank(ranks: Ranks) -> bool:
    """Return whether this process draws the bar of all ranks: the first of them, or of torchrun's processes."""
    if is_started():
        return torch.distributed.get_rank() == 0
    by_torchrun = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    return ranks.rank == 0 and by_torchrun == "0"


def with_progress(loader: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Iterate over the next epoch of a loader with a bar; `options` override its settings of tqdm."""
    return UntilEnd(_with_bar(loader, options))


def _with_bar(loader: Any, options: dict[str, Any]) -> Iterator[Any]:
    from tqdm.auto import tqdm  # imported at use, as it may warn in a notebook about missing widgets

    total = None
    with contextlib.suppress(TypeError):  # the number is not known
        total = len(loader)
    sources = loader._endless_or_sources
    by_batches = sources is None or total is not None
    count = total if by_batches else sources
    given = {"total": count, "unit": "batch" if by_batches else "source"}
    begun = loader._position.coming_begun  # more than 0 if the epoch is resumed
    given["initial"] = loader._position.coming_count if by_batches else max(begun - loader.batch_size, 0)
    if (sys.stderr is None and "file" not in options) or not _is_first_rank(loader._ranks):
        given["disable"] = True
    begin, next_look = loader.stats(), 0.0
    with tqdm(**({"disable": None, "dynamic_ncols": True} | given | options)) as bar:
        for batch in loader:
            yield batch
            if bar.disable or not (bar.update(1) if by_batches else time.monotonic() >= next_look):
                continue
            since = loader.stats() - begin
            text = f"{since.items_per_second:,.0f} items/s, padding {since.padding_share:.1%}"
            bar.set_postfix_str(text, refresh=False)
            if not by_batches:
                next_look = time.monotonic() + bar.mininterval
                done = max(begun + since.begun - loader.batch_size, 0)  # each lane may still be reading one source
                bar.update(min(done, bar.total) - bar.n)
        if not (by_batches or bar.disable):
            bar.update(bar.total - bar.n)
