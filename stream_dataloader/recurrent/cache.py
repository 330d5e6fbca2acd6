"""`LaneCache`: the last steps of each lane's stream, for attention: memories, caches of keys and values.

::

    M = 4 kept, T = 3 in the window         what each step of the window may look at (the mask)
    lane 0: its stream has 2 steps so far        kept         window
        kept    . . a a   window  a a a     t=0  . . a a      a
                                            t=1  . . a a      a a
    lane 1: another stream starts           t=2  . . a a      a a a
        kept    b b b b   window  b c c
                                            t=1  . . . .      . c

Guarantees: the size never changes, so shapes are the same from the first window on and after a resume. A step sees
steps of its own stream alone, none that come later, and no padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stream_dataloader import _options as options
from stream_dataloader._hints import hinted
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
    """Keeps the last M steps of each lane's stream, of a fixed size, the newest last, and tells who may look where.

    What is kept is what the model makes of its steps: one tensor, or a list of layers with keys and values each. The
    memories of Transformer-XL (Dai et al., 2019) and caches of keys and values are carried so. Keep a lane's whole
    stream with `steps=max(lengths)`. What has no fixed size goes into a `LaneMemory`.

    Args:
        steps: Number M of steps that are kept.
        batch_dim: The dimension of the lanes in each tensor.
        time_dim: The dimension of the time steps in each tensor.
        rank: Which rank this process is, for checkpoints; needs `world_size`. None: torch.distributed is asked.
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
        ...     print(seen[mask[0, 0]].tolist())  # what the first step of lane 0 sees
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
        """What is kept of the steps before a batch, and what each of its steps may look at.

        Nothing changes by asking. Put what the model makes of the window behind what is kept, along time: entry j of
        both together is `M + t - j` steps before step t of the window.

        Args:
            batch: A batch, part or micro-batch, on any device.

        Returns:
            What was kept, in the structure that `after` was given, with M time steps; None before the first call of
            that: zeros will do. And the mask, `(B, T, M + T)` bool on the batch's device: step t of lane b may look at
            kept step m, or at step m - M of the window. A step that is padding sees itself, so that no row is empty.

        Raises:
            StateError: A lane does not go on where its steps stopped: a batch is left out, repeated, or of another
                loader.
            NonFiniteStateError: A lane would go on with NaN or infinity.
            TypeError: This is no `StreamBatch`.
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
        """Keep what the model made of a window's steps, detached; of padding nothing is kept.

        Args:
            batch: The batch that `before` was given.
            new: One tensor, or a structure of them, each with the window's T time steps and B lanes: what belongs
                behind what `before` returned, without that.

        Raises:
            StateError: As `before`; or it has another structure or shape than the one before.
            ValueError: A tensor has not T steps and B lanes in its dimensions.
        """
        state = self._carry.before(batch)
        self._check_sizes(batch, new)
        host = on_host(batch)
        real, begun = ~host.is_padding, host.is_first.cumsum(0)
        if state is None:
            kept, count = map_tensors(self._none_kept, new), begun.new_zeros(len(batch))
        else:
            kept, count = _parts(state)
        # the last M of the steps that are there, in order
        there = torch.cat([real.new_ones(self.steps, len(batch)), real])
        last = None if real.all() else there.to(torch.uint8).argsort(stable=True, dim=0)[-self.steps :]
        kept = map_tensors(lambda *both: self._last_of(torch.cat(both, self._time_dim).detach(), last), kept, new)
        since = (real & (begun == begun[-1])).sum(0)
        since = to_device(since, count.device) + torch.where(to_device(begun[-1] == 0, count.device), count, 0)
        self._carry.after(batch, {"count": since, "kept": kept})

    def _none_kept(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros([self.steps if i == self._time_dim else size for i, size in enumerate(like.shape)])

    def _last_of(self, both: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """The last M of kept and new steps, or those at the places `last`, `(M, B)`."""
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
            what = f"{names_of(node)[i]} is {tuple(leaf.shape)}, and the window has {batch.time_steps} steps (dimension"
            what += f" {self._time_dim}, time_dim) of {len(batch)} lanes (dimension {self._lane_dim}, batch_dim)"
            raise ValueError(f"{what}; pass what the model made of this window, without what before() returned")

    def reset(self, lanes: Iterable[int] | None = None) -> None:
        """Forget the steps of lanes, or of all; see `RecurrentState.reset`."""
        self._carry.reset(lanes)

    def to(self, device: torch.device | str | int) -> Self:
        """Move what is kept to a device.

        Returns:
            The object itself.
        """
        self._carry.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """What is kept, as of the last batch that was passed to `after`; see `RecurrentState.state_dict`."""
        return self._carry.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, loader: StreamDataLoader[Any] | None = None) -> None:
        """Go on from a saved state; see `RecurrentState.load_state_dict`.

        Raises:
            StateError: As there; or it is that of a `RecurrentState`, or of another number of steps.
        """
        check_state(state, "RecurrentState")
        if state["lanes"]:
            tree = tensors_from_plain(state).tree
            if not isinstance(tree, dict) or set(tree) != {"count", "kept"}:
                raise StateError("the state is that of a RecurrentState; load what a LaneCache saved")
            sizes = {leaf.shape[self._time_dim] for leaf in take_apart(tree["kept"])[1]}
            if sizes != {self.steps}:
                what = f"the state has {sorted(sizes)} steps, and here are {self.steps}"
                raise StateError(f"{what}; load what a LaneCache like this saved")
        self._carry.load_state_dict(state, loader=loader)

    @property
    def place(self) -> tuple[int, int]:
        """Which rank this is, and how many there are."""
        return self._carry.place

    def snapshot(self) -> Self:
        """A copy that keeps what is kept now; see `RecurrentState.snapshot`."""
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__ | {"_carry": self._carry.snapshot()}
        return twin

    def __repr__(self) -> str:
        return f"LaneCache(steps={self.steps})"


def _parts(state: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
    return state["kept"], state["count"]
