"""A progress bar over an epoch: exact batches where their number is known, else sources done.

Guarantee: what is iterated is the loader's own iterator.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["with_progress"]


def with_progress(loader: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Iterate over the next epoch of a loader; `options` of tqdm win."""
    from tqdm.auto import tqdm  # here, as in a notebook it warns of what it misses

    members, total = loader.dataset.members, None
    endless = any(member.is_endless for member in members)
    with contextlib.suppress(TypeError):  # it is not known
        total = len(loader)
    by_batches = endless or total is not None
    count = total if by_batches else sum(len(member.sources) for member in members)
    given = {"total": count, "unit": "batch" if by_batches else "source"}
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
                done = max(since.begun - loader.batch_size, 0)  # those that lanes read now are not done
                bar.update(min(done, bar.total) - bar.n)
        if not (by_batches or bar.disable):
            bar.update(bar.total - bar.n)
