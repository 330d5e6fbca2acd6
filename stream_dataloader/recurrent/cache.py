"""`LaneCache`: the last steps of each lane's stream, for memories and key-value caches of attention.

::

    M = 4 kept, T = 3 in the window         steps that each step of the window may attend to (the mask)
    lane 0: its stream has 2 steps so far        kept         window
        kept    . . a a   window  a a a     t=0  . . a a      a
                                            t=1  . . a a      a a
    lane 1: another stream starts           t=2  . . a a      a a a
        kept    b b b b   window  b c c
                                            t=1  . . . .      . c

Guarantees: the size never changes, so shapes are the same from the first window on and after a resume. A step attends
only to steps of its own stream, to none that come later, and to no padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stream_dataloader._engine import options
from stream_dataloader._engine.hints import hinted
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.checkpoint import check_state, tensors_from_plain
from stream_dataloader.recurrent.order import on_host
from stream_dataloader.recurrent.state import RecurrentState
from stream_dataloader.recurrent.states import map_tensors, names_of, take_apart
from stream_dataloader.recurrent.varlen import to_device

if TYPE_CHECKING:
    from typing_extensions import Self

    from stream_dataloader.dataloader import StreamDataLoader

__all__ = ["LaneCache"]


@hinted
class LaneCache:
    """Cache of fixed size with the last M steps of each lane's stream, the newest last, and the attention mask for it.

    The cache holds the model's own output for each step: one tensor, or a list of layers with keys and values. It suits
    the memories of Transformer-XL (Dai et al., 2019) and key-value caches. To keep a lane's whole stream, set
    `steps=max(lengths)`. For values without a fixed size, use a `LaneMemory`.

    Args:
        steps: Number of steps to keep, M.
        batch_dim: The dimension of the lanes in each tensor.
        time_dim: The dimension of the time steps in each tensor.
        rank: Rank of this process, for checkpoints; needs `world_size`. None: taken from torch.distributed.
        world_size: Number of ranks.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range, or both dimensions are the same.

    Example:
        >>> import torch
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import LaneCache
        >>> def counting(n):
        ...     return (torch.tensor([t]) for t in range(n))
        >>> loader = StreamDataLoader(StreamDataset([5, 2, 3], counting, 2, time_steps=2))
        >>> cache = LaneCache(3)
        >>> for batch in loader:
        ...     past, mask = cache.before(batch)  # (3, 2, 1), None at first; (2, 2, 5)
        ...     past = torch.zeros(3, 2, 1, dtype=torch.int64) if past is None else past
        ...     seen = torch.cat([past, batch.data])[:, 0, 0]
        ...     print(seen[mask[0, 0]].tolist())  # the steps that the first step of lane 0 attends to
        ...     cache.after(batch, batch.data)
        [0]
        [0, 1, 2]
        [1, 2, 3, 4]
    """

    def __init__(
        self,
        steps: int,
        *,
        batch_dim: int = 1,
        time_dim: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.steps = options.integer("steps", steps, 1)
        self._lane_dim = options.integer("batch_dim", batch_dim, 0)
        self._time_dim = options.integer("time_dim", time_dim, 0)
        if batch_dim == time_dim:
            raise ValueError(f"batch_dim and time_dim are both {batch_dim}; lanes and time steps are two dimensions")
        self._carry = RecurrentState(
            batch_dim={"count": 0, "kept": batch_dim}, packed=True, rank=rank, world_size=world_size
        )

    def before(self, batch: StreamBatch) -> tuple[Any, torch.Tensor]:
        """Return the kept steps before a batch, and the attention mask of the batch's steps.

        This call changes nothing. Concatenate the model's output for the window after the kept steps, along time. Then
        entry j of the result is `M + t - j` steps before step t of the window.

        Args:
            batch: A batch, part or micro-batch, on any device.

        Returns:
            The kept steps, in the structure given to `after`, with M time steps. None before the first call of `after`;
            use zeros then. And the mask, `(B, T, M + T)` bool on the batch's device: entry `[b, t, m]` is True if step
            t of lane b may attend to kept step m, or to step m - M of the window. A padded step attends to itself, so
            that no row is empty.

        Raises:
            StateError: A lane does not continue where its steps stopped: a batch was left out, was repeated, or is from
                another loader.
            NonFiniteStateError: A lane would continue with NaN or infinity.
            TypeError: `batch` is not a `StreamBatch`.
        """
        state = self._carry.before(batch)
        host = on_host(batch)
        real, begun = ~host.is_padding, host.is_first.cumsum(0)
        t = torch.arange(batch.time_steps, dtype=torch.int64, device="cpu")
        not_later = (t[:, None] >= t)[..., None]
        of_stream = (begun[:, None] == begun) & real & not_later | (t[:, None] == t)[..., None]
        kept, count = (None, real.new_zeros(len(batch), dtype=torch.int64)) if state is None else _parts(state)
        m = torch.arange(self.steps, dtype=torch.int64, device=count.device)
        is_own = (m[:, None] >= self.steps - count).to(batch.mask.device)
        of_kept = is_own & to_device(begun == 0, batch.mask.device)[:, None]
        mask = torch.cat([of_kept, to_device(of_stream, batch.mask.device)], 1)
        return kept, mask.permute(2, 0, 1)

    def after(self, batch: StreamBatch, new: Any) -> None:
        """Keep the model's output for a window's steps, detached. Padded steps are not kept.

        Args:
            batch: The batch that `before` was given.
            new: One tensor, or a structure of them, each with the window's T time steps and B lanes. Pass only the new
                steps, without those that `before` returned.

        Raises:
            StateError: As in `before`; or the structure or shape differs from the last one.
            ValueError: A tensor does not have T steps and B lanes in the expected dimensions.
        """
        state = self._carry.before(batch)
        self._check_sizes(batch, new)
        host = on_host(batch)
        real, begun = ~host.is_padding, host.is_first.cumsum(0)
        if state is None:
            kept, count = map_tensors(self._none_kept, new), begun.new_zeros(len(batch))
        else:
            kept, count = _parts(state)
        # the last M steps that are not padding, in order
        there = torch.cat([real.new_ones(self.steps, len(batch)), real])
        last = None if real.all() else there.to(torch.uint8).argsort(stable=True, dim=0)[-self.steps :]
        kept = map_tensors(lambda *both: self._last_of(torch.cat(both, self._time_dim).detach(), last), kept, new)
        since = (real & (begun == begun[-1])).sum(0)
        since = to_device(since, count.device) + torch.where(to_device(begun[-1] == 0, count.device), count, 0)
        self._carry.after(batch, {"count": since, "kept": kept})

    def _none_kept(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros([self.steps if i == self._time_dim else size for i, size in enumerate(like.shape)])

    def _last_of(self, both: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """Return the last M of kept and new steps, or those at the indices `last`, `(M, B)`."""
        if last is None:
            return both.narrow(self._time_dim, both.shape[self._time_dim] - self.steps, self.steps)
        places = to_device(last, both.device)
        if self._time_dim > self._lane_dim:
            places = places.T
        sizes = [size if i in (self._time_dim, self._lane_dim) else 1 for i, size in enumerate(both.shape)]
        sizes[self._time_dim] = self.steps
        shape = [self.steps if i == self._time_dim else size for i, size in enumerate(both.shape)]
        return both.gather(self._time_dim, places.reshape(sizes).expand(shape))

    def _check_sizes(self, batch: StreamBatch, new: Any) -> None:
        node, leaves = take_apart(new, "new")
        dims = {self._time_dim: batch.time_steps, self._lane_dim: len(batch)}
        for i, leaf in enumerate(leaves):
            if leaf.ndim > max(dims) and all(leaf.shape[dim] == size for dim, size in dims.items()):
                continue
            what = f"{names_of(node)[i]} is {tuple(leaf.shape)}, but the window has {batch.time_steps} steps (dimension"
            what += f" {self._time_dim}, time_dim) of {len(batch)} lanes (dimension {self._lane_dim}, batch_dim)"
            raise ValueError(f"{what}; pass the model's output for this window, without the steps from before()")

    def reset(self, lanes: Iterable[int] | None = None) -> None:
        """Forget the steps of lanes, or of all; see `RecurrentState.reset`."""
        self._carry.reset(lanes)

    def to(self, device: torch.device | str | int) -> Self:
        """Move the kept steps to a device.

        Returns:
            The object itself.
        """
        self._carry.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the kept steps after the last batch passed to `after`; see `RecurrentState.state_dict`."""
        return self._carry.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, loader: StreamDataLoader[Any] | None = None) -> None:
        """Continue from a saved state; see `RecurrentState.load_state_dict`.

        Raises:
            StateError: As there; or the state is from a `RecurrentState`, or has another number of steps.
        """
        check_state(state, "RecurrentState")
        if state["lanes"]:
            tree = tensors_from_plain(state).tree
            if not isinstance(tree, dict) or set(tree) != {"count", "kept"}:
                raise StateError("the state is from a RecurrentState; load a state that a LaneCache saved")
            counts = take_apart(tree["count"])[1]
            if len(counts) != 1 or counts[0].dtype != torch.int64 or counts[0].ndim != 1 or counts[0].min() < 0:
                raise StateError("the state's numbers of kept steps are none; it was changed since it was saved")
            leaves = take_apart(tree["kept"])[1]
            sizes = {leaf.shape[self._time_dim] if leaf.ndim > self._time_dim else 0 for leaf in leaves}
            if sizes != {self.steps}:
                what = f"the state has {sorted(sizes)} steps, but this cache keeps {self.steps}"
                raise StateError(f"{what}; load a state that was saved with the same steps=")
        self._carry.load_state_dict(state, loader=loader)

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._carry._place

    def _snapshot(self) -> Self:
        """Return a copy with the steps kept now. It shares the tensors."""
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__ | {"_carry": self._carry._snapshot()}
        return twin

    def __repr__(self) -> str:
        return f"LaneCache(steps={self.steps})"


def _parts(state: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
    return state["kept"], state["count"]
