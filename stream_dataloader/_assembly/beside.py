"""Puts the batches of several loaders side by side: one batch, whose lanes say which loader they are of.

Guarantee: all lanes of one member are what that member's own batch holds; those of a member that has ended are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stream_dataloader._items.fill import FillValue
from stream_dataloader._items.layout import Layout, as_tensor, window_spec_of
from stream_dataloader._items.structure import Misfit, collect, flatten
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import ItemError

_BOOKKEEPING = {"is_start": False, "mask": False, "source": -1, "position": -1}  # and what pads them


class Joiner:
    """Joins batches.

    Args:
        fill_values: What pads each member's lanes.
        lanes: How many lanes each member has.
        mark_ends: Whether all of them mark the last steps of streams.
    """

    def __init__(self, fill_values: Sequence[Any], lanes: Sequence[int], *, mark_ends: bool) -> None:
        self._fills = [FillValue(value) for value in fill_values]
        self._lanes = lanes
        self._mark_ends = mark_ends
        self._member = torch.repeat_interleave(torch.arange(len(lanes)), torch.tensor(lanes))
        self._owners: list[torch.Tensor | None] = [None] * len(lanes)

    def join(self, batches: Sequence[StreamBatch | None], step: int, epoch: int) -> StreamBatch:
        """One batch of each member's; None stands for a member that has ended. One at least has not.

        Raises:
            ItemError: Their data do not fit beside each other.
            ValueError: A fill value does not fit them.
        """
        given = [(number, batch) for number, batch in enumerate(batches) if batch is not None]
        first, one = given[0]
        layout, _ = _layout_of(one.data, None)
        columns: list[Any] = []
        for number, batch in enumerate(batches):
            if batch is None:
                columns.append(self._padding(number, layout, one))
            else:
                try:
                    columns.append(_layout_of(batch.data, layout)[1])
                except Misfit as misfit:
                    raise ItemError(
                        f"members {first} and {number} of side_by_side do not fit beside each other: in member "
                        f"{number} {misfit} in member {first}; have both yield items of one structure, with the same "
                        "dtypes and shapes"
                    ) from None
        device = one.mask.device
        books: dict[str, Any] = {name: self._beside(batches, name, fill, one) for name, fill in _BOOKKEEPING.items()}
        return StreamBatch(
            data=layout.build(map(_joined, zip(*columns, strict=True))),
            reset=books["is_start"][0],
            worker_id=self._workers(batches).to(device),
            lane=torch.arange(len(self._member), device=device),
            member=self._member.to(device),
            is_last=self._beside(batches, "is_last", False, one) if self._mark_ends else None,
            step=step,
            epoch=epoch,
            **books,
        )

    def _padding(self, number: int, layout: Layout, like: StreamBatch) -> list[Any]:
        """The leaves of a member that has ended, over one cell's memory."""
        width, device = self._lanes[number], like.mask.device
        leaves: list[Any] = []
        for spec, fill in zip(layout.specs, self._fills[number].of(layout), strict=True):
            if spec.dtype is None or fill is None:
                leaves.append([[None] * width for _ in range(like.time_steps)])
            else:
                cell = as_tensor(fill, spec.dtype).to(device)
                leaves.append(cell.expand(like.time_steps, width, *spec.shape))
        return leaves

    def _beside(self, batches: Sequence[StreamBatch | None], name: str, fill: Any, like: StreamBatch) -> torch.Tensor:
        known: torch.Tensor = getattr(like, name)
        return torch.cat(
            [
                known.new_full((like.time_steps, width), fill) if batch is None else getattr(batch, name)
                for batch, width in zip(batches, self._lanes, strict=True)
            ],
            dim=1,
        )

    def _workers(self, batches: Sequence[StreamBatch | None]) -> torch.Tensor:
        """The workers of all lanes, numbered over all members."""
        for number, batch in enumerate(batches):
            if batch is not None and self._owners[number] is None:
                self._owners[number] = batch.worker_id.cpu()
        first, numbered = 0, []
        for owners, width in zip(self._owners, self._lanes, strict=True):
            own = torch.zeros(width, dtype=torch.int64) if owners is None else owners
            numbered.append(own + first)
            first = int(numbered[-1].max()) + 1
        return torch.cat(numbered)


def _layout_of(data: Any, like: Layout | None) -> tuple[Layout, list[Any]]:
    """What the items of a batch look like, and its leaves in the order of that.

    Args:
        like: What they have to look like.

    Raises:
        Misfit: They look otherwise.
    """
    structure, leaves = flatten(data)
    if like is not None:
        leaves = []
        collect(data, like.structure, "", leaves)
        structure = like.structure
    specs = [window_spec_of(leaf) for leaf in leaves]  # the second axis is the lanes'
    layout = Layout(structure, tuple(s._replace(shape=s.shape[1:], timed=True) for s in specs), windowed=False)
    if like is not None:
        for path, ours, theirs in zip(like.paths, like.specs, layout.specs, strict=True):
            if ours != theirs:
                raise Misfit(f"{path} is {theirs}, and {ours}")
    return layout, leaves


def _joined(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], list):
        return [[cell for row in rows for cell in row] for rows in zip(*leaves, strict=True)]
    return torch.cat(leaves, dim=1)
