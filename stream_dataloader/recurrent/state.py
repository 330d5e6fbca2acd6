"""`RecurrentState`: carries a model's state from batch to batch, lane by lane.

Guarantees: a lane's state goes only to the batch that continues the lane; no tensor is changed in place.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._engine import options
from stream_dataloader._engine.hints import hinted
from stream_dataloader._engine.items.structure import children_of
from stream_dataloader._engine.ranks.own_rank import OwnRank
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import NonFiniteStateError, StateError
from stream_dataloader.recurrent.checkpoint import of_rank, state_of, tensors_from_plain, tensors_to_plain
from stream_dataloader.recurrent.initial import Initial
from stream_dataloader.recurrent.order import LaneOrder, Window, check_batch, check_no_start_inside, on_host
from stream_dataloader.recurrent.states import check_same, dims_of, states_of
from stream_dataloader.recurrent.store import LaneStore, Piece
from stream_dataloader.recurrent.varlen import to_device

if TYPE_CHECKING:
    from typing_extensions import Self

    from stream_dataloader.dataloader import StreamDataLoader

__all__ = ["RecurrentState"]

NonFinite = Literal["raise", "reset", "keep"]
BurnInAt = Literal["start", "window"]


@hinted
class RecurrentState:
    """State of a recurrent model, carried from batch to batch.

    A state is a tensor with a row for each lane, or a tuple, list, dict or dataclass of such tensors and None. Examples
    are the state of `torch.nn.LSTM`, a list of layers, and maps `(B, C, H, W)`. It is kept by lane number, so batches,
    the parts of `loader.parts()` and micro-batches (`StreamBatch.split_lanes`) all work. Use one for each loader,
    outside of `torch.compile`, and outside of the module that DistributedDataParallel wraps.

    Args:
        initial: State of a lane at the start of its stream. None: zeros. Or the state of one lane, with size 1 in the
            dimension of the lanes; it is learnt if its tensors are Parameters. Or a function of the batch that returns
            the state of its B lanes; while gradients are enabled, it is called for each batch, on all ranks alike.
        batch_dim: Dimension of the lanes: 1 for `torch.nn.LSTM` and `GRU`, 0 for cells and convolutions. Or one
            dimension for each tensor, in the structure of the state. None: the only dimension of the right size; it is
            an error if several have that size.
        detach_every: Number of windows that a gradient goes back. With more than 1, add up losses until `after` returns
            True, and then call `backward()`.
        nonfinite: Action if a lane continues with NaN or infinity in its state. `"raise"`: `NonFiniteStateError`.
            `"reset"`: give the lane the initial value, with a warning. `"keep"`: no check.
        burn_in: Number of burn-in steps, which update the state but do not count in the loss; see `loss_mask`
            (Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning, 2019).
        burn_in_at: `"start"`: burn-in begins wherever a lane's state is reset: at the start of a stream, of a section,
            or of a sequence that a stream marks, and after `reset`. `"window"`: it begins with each window.
        packed: Whether the model resets states where `batch.is_first` is set inside a window, as `masked_rnn` and
            `linear_scan` do. If False, a stream that starts inside a window is an error.
        rank: Rank of this process, for checkpoints; needs `world_size`. None: taken from torch.distributed.
        world_size: Number of ranks.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range, or the initial state has a wrong shape or cannot learn.

    Example:
        >>> import torch
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import RecurrentState
        >>> def counting(n):
        ...     return (torch.ones(1) for _ in range(n))
        >>> loader = StreamDataLoader(StreamDataset([5, 2, 3], counting, 2, time_steps=2))
        >>> carry = RecurrentState(batch_dim=0)
        >>> for batch in loader:
        ...     count = carry.before(batch)  # None at first: the model begins with zeros
        ...     count = batch.data.sum(0) + (0 if count is None else count)
        ...     _ = carry.after(batch, count)
        ...     print(count.flatten().tolist(), batch.reset.tolist())
        [2.0, 2.0] [True, True]
        [4.0, 2.0] [False, True]
        [5.0, 3.0] [False, False]
    """

    def __init__(
        self,
        initial: Any = None,
        *,
        batch_dim: Any = None,
        detach_every: int = 1,
        nonfinite: NonFinite = "raise",
        burn_in: int = 0,
        burn_in_at: BurnInAt = "start",
        packed: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if batch_dim is not None and not isinstance(batch_dim, (int, list)) and children_of(batch_dim) is None:
            raise TypeError(f"batch_dim must be an integer, or a structure of integers, not {batch_dim!r}")
        self._initial = Initial(initial, batch_dim)
        self._batch_dim = batch_dim
        self._detach_every = options.integer("detach_every", detach_every, 1)
        self._nonfinite = options.choice("nonfinite", nonfinite, NonFinite)
        self._burn_in = options.integer("burn_in", burn_in, 0)
        self._burn_in_at: BurnInAt = options.choice("burn_in_at", burn_in_at, BurnInAt)
        self._counts = self._burn_in > 0 and self._burn_in_at == "start"
        self._packed = packed
        self._rank = OwnRank(rank, world_size)
        self._store = LaneStore()
        self._order = LaneOrder()
        self._seen: tuple[weakref.ref[StreamBatch], Window] | None = None

    def before(self, batch: StreamBatch) -> Any:
        """Return the state to call the model with: the one `after` kept, or the initial value where a stream starts.

        This call changes nothing. The tensors may be the kept ones, so do not change them in place.

        Args:
            batch: A batch, part or micro-batch, on any device.

        Returns:
            A state of the batch's B lanes. None if the initial value is zeros and no state is known yet; torch's
            networks and cells treat None as zeros.

        Raises:
            StateError: A lane does not continue where its state stopped: a batch was left out, was repeated, or is from
                another loader.
            NonFiniteStateError: A lane would continue with NaN or infinity.
            ValueError: A stream starts inside the window, and `packed` is not set.
            TypeError: `batch` is not a `StreamBatch`.
        """
        window = self._checked(batch)
        kept = self._kept(batch, window)
        if kept is None:
            return self._initial.begin(batch)
        fresh = window.starts | ~self._order.known(window) | self._not_finite(window, kept)
        if fresh.any() or self._initial.is_in_every_graph:
            return self._initial.blend(batch, kept.states, fresh).tree
        return kept.states.tree

    def after(self, batch: StreamBatch, state: Any) -> bool:
        """Keep the state that the model returned, detached, for the batch that continues this one.

        Lanes without an item in the batch keep their state.

        Args:
            batch: The batch that `before` was given.
            state: The state of its B lanes after the last time step.

        Returns:
            True if the gradient ends here. With `detach_every` it does not end after every window.

        Raises:
            StateError: As in `before`; or the structure or shape of the state differs from the last one.
            ValueError: The state does not have a row for each lane, or `batch_dim` is needed to find the rows.
            TypeError: The state holds something that is not a tensor.
        """
        window = self._checked(batch)
        states = states_of(state, len(batch), self._batch_dim, self._store.known)
        if self._store.known is None and self._initial.states is not None:
            check_same(self._initial.states.node, states.node, "initial", "the state returned")
        kept = self._kept(batch, window)
        if not window.real.all():
            old = states.zeros(1) if kept is None else kept.states
            states = states.blended(torch.from_numpy(~window.real), old.leaves)
        uncut = 1 + (0 if kept is None else kept.uncut)
        if cut := uncut >= self._detach_every:
            states, uncut = states.map(lambda leaf, _: leaf.detach().clone()), 0  # a view would hold all outputs
        self._store.put(Piece(window.lanes, states, uncut=uncut, is_checked=self._nonfinite != "keep"))
        self._order.advance(window, counts=self._counts)
        return cut

    def reset(self, lanes: Iterable[int] | None = None) -> None:
        """Forget the state of lanes; each lane gets the initial value before its next batch.

        Args:
            lanes: Numbers of the lanes; None for all.

        Raises:
            ValueError: A number is negative.
        """
        chosen = self._order.forget(lanes)
        if chosen is None:
            self._store = LaneStore()
        else:
            self._store.drop(chosen)

    def to(self, device: torch.device | str | int) -> Self:
        """Move the kept states and a fixed initial state to a device. Parameters move with their module.

        Returns:
            The object itself.
        """
        for piece in self._store:
            self._store.put(piece.to(torch.device(device)))
        self._initial.to(torch.device(device))
        return self

    def _burn_in_mask(self, batch: StreamBatch) -> torch.Tensor:
        """Return `(T, B)` bool: the step is an item of the stream, and burn-in."""
        return self._burn_in_of(batch, ~batch.is_padding)

    def _burn_in_of(self, batch: StreamBatch, real: torch.Tensor) -> torch.Tensor:
        """Return the burn-in steps of a batch on the device of `real`, the mask of the batch's items."""
        if self._counts:
            window = self._window(batch)
            young = window.ages(self._order.age(window))[:-1] < self._burn_in
            return real & to_device(torch.from_numpy(young), real.device)
        t = torch.arange(batch.time_steps, dtype=torch.int64, device=real.device)
        return real & (t < self._burn_in)[:, None]

    def loss_mask(self, batch: StreamBatch) -> torch.Tensor:
        """Return `(T, B)` bool: the step counts in the loss. This is `batch.mask` without the burn-in.

        Raises:
            StateError: `burn_in_at="start"` counts items, and the batch is neither the next one of its lanes nor the
                last one given to `after`.
        """
        return batch.mask & ~self._burn_in_mask(batch)

    def burning_in(self, batch: StreamBatch) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the first `burn_in` time steps: no gradient if they are burn-in or padding in all lanes.

        It does nothing if the initial state may be learnt, because other ranks wait for that gradient.
        """
        host, head = on_host(batch), slice(0, self._burn_in)
        if self._initial.is_in_every_graph or not self._burn_in:
            return contextlib.nullcontext()
        real = ~host.is_padding
        is_burn_in = self._burn_in_of(batch, real)[head] | ~real[head]
        return torch.no_grad() if is_burn_in.all() else contextlib.nullcontext()

    def cut_burn_in(self, batch: StreamBatch, state: Any, t: int) -> Any:
        """Return the state before time step t, with the gradient cut in lanes whose step t - 1 is burn-in.

        Args:
            batch: The batch.
            state: The state before step t.
            t: A time step, 1 to T.

        Raises:
            ValueError: `t` is out of range, or the structure of the state differs from the kept ones.
        """
        if not 1 <= t <= batch.time_steps:
            raise ValueError(f"t is {t}; it must be 1 to {batch.time_steps}, the batch's time steps")
        states = states_of(state, len(batch), self._batch_dim, self._store.known)
        return states.blended(self._burn_in_mask(batch)[t - 1], [leaf.detach() for leaf in states.leaves]).tree

    def state_dict(self) -> dict[str, Any]:
        """Return the states after the last batch passed to `after`, as tensors, lists, numbers and names.

        Save the result with the loader's state after the same batch, `batch.state_dict()`. Each rank saves its own;
        `stream_dataloader.merge_states` merges them. A learnt initial state is in the module's own state.

        Raises:
            StateError: Gradients go back beyond the last batch, or a class in the state cannot be imported again.
        """
        if self._store.uncut:
            what = f"gradients go back {self._store.uncut} of {self._detach_every} windows (detach_every)"
            raise StateError(f"{what}, which cannot be saved; save after a call of after() that returned True")
        lanes = self._store.lanes
        return state_of(lanes, self._order, self._place, tensors_to_plain(self._store.get(lanes)))

    def load_state_dict(self, state: Mapping[str, Any], *, loader: StreamDataLoader[Any] | None = None) -> None:
        """Continue from a saved state and forget the current states.

        Args:
            state: The result of `state_dict()` on this rank, with the same number of ranks. Or the result of
                `merge_states`, for any number of ranks. It is not copied, but moved to the first batch's device.
            loader: The loader, if it has loaded its state with another number of lanes (`changes=["batch_size"]`). It
                knows the former number of each lane. States of removed lanes are left out; new lanes start empty.

        Raises:
            StateError: This is not a state, it is from another model, or it does not have this rank's lanes. Or the
                loader has loaded no state, or one with other lanes.
        """
        own = of_rank(state, "RecurrentState", self._place, loader)
        if own is None:
            self._store, self._order = LaneStore(), LaneOrder()
            return
        states, lanes = tensors_from_plain(state), own.lanes
        if len(own.rows) < len(state["lanes"]) or loader is not None:
            states = states.columns(own.rows)
        if (known := self._store.known or self._initial.states) is not None:
            states.check_like(known, "the saved state")
        if self._batch_dim is not None:
            dims = dims_of(states.node, states.leaves, len(lanes), self._batch_dim, "the saved state")
            if dims != list(states.dims):
                raise StateError(f"the state has lanes in dimensions {states.dims}, but batch_dim says {dims}")
        self._store = LaneStore()
        self._store.put(Piece(lanes, states, is_checked=self._nonfinite != "keep"))
        self._order = own.order()

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._rank.numbers

    def _snapshot(self) -> Self:
        """Return a copy with the states kept now. It shares the tensors, because none is ever changed in place."""
        twin = copy.copy(self)
        twin._store, twin._order = copy.copy(self._store), copy.deepcopy(self._order)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_seen": None}

    def __repr__(self) -> str:
        known = self._store.known
        return f"RecurrentState({'nothing kept' if known is None else f'{len(self._store.lanes)} lanes: {known}'})"

    def _checked(self, batch: StreamBatch) -> Window:
        """Return the window of a batch after checking that it continues the kept states."""
        window = self._window(batch)
        self._order.check(window, whole="_state" in batch.__dict__)
        return window

    def _window(self, batch: StreamBatch) -> Window:
        """Return the window of a batch. The last window is remembered."""
        if self._seen is not None and self._seen[0]() is batch:
            return self._seen[1]
        check_batch(batch, "a RecurrentState")
        if not self._packed:
            check_no_start_inside(batch)
        window = Window.of(batch)
        self._seen = weakref.ref(batch), window
        return window

    def _kept(self, batch: StreamBatch, window: Window) -> Piece | None:
        """Return the kept states of a batch's lanes."""
        kept = self._store.get(window.lanes)
        device = batch.mask.device
        if kept is not None and self._order.is_loaded and device.type != "cpu":
            return kept.to(device)
        return kept

    def _not_finite(self, window: Window, kept: Piece) -> npt.NDArray[np.bool_]:
        """Return `(B,)`: the lane would continue with a state that is not finite."""
        if kept.check is None or not (bad := kept.check.bad() & window.goes_on).any():
            return np.zeros(len(window.lanes), np.bool_)
        row = int(bad.argmax())
        lane, source, position = (int(own[row]) for own in (window.lanes, *window.first[:2]))
        more = f" (and {bad.sum() - 1} more lanes)" if bad.sum() > 1 else ""
        text = f"lane {lane} goes on with source {source} at position {position}, but its state holds NaN or infinity"
        if self._nonfinite == "raise":
            raise NonFiniteStateError(
                f"{text}{more}, which would stay until the stream ends: clip gradients, take smaller steps, call "
                f'reset([{lane}]), or say nonfinite="reset"',
                source_index=source,
                position=position,
                lane=lane,
            )
        self._order.begin_anew(window.lanes[bad])
        warnings.warn(f"{text}{more}; it was reset to the initial value", RuntimeWarning, stacklevel=3)
        return bad
