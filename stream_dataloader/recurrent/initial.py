"""State of a lane at the start of its stream: zeros, a given state, a learnt one, or a function of the batch.

Guarantee: a learnt state is part of every batch's graph, because DistributedDataParallel waits for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._engine.items.structure import leaf_paths
from stream_dataloader.batch import StreamBatch
from stream_dataloader.recurrent.states import States, check_same, dims_of, names_of, take_apart


class Initial:
    """The initial state; see `RecurrentState`. `states` is the state of one lane, if one was given."""

    def __init__(self, given: Any, batch_dim: Any) -> None:
        self._function: Callable[[StreamBatch], Any] | None = None
        self.states: States | None = None
        if callable(given) and not isinstance(given, torch.Tensor):
            self._function = given
        elif given is not None:
            node, leaves = take_apart(given, "initial")
            self.states = States(node, leaves, dims_of(node, leaves, 1, batch_dim, "initial"))
            for name, leaf in zip(leaf_paths(node, "initial"), leaves, strict=True):
                _check_learnt(name, leaf)

    @property
    def is_in_every_graph(self) -> bool:
        is_learnt = self.states is not None and any(leaf.requires_grad for leaf in self.states.leaves)
        return (is_learnt or self._function is not None) and torch.is_grad_enabled()

    def to(self, device: torch.device) -> None:
        """Move a given state to a device. Learnt states move with their module."""
        if self.states is not None:
            self.states = self.states.map(lambda leaf, _: leaf if leaf.requires_grad else leaf.to(device))

    def begin(self, batch: StreamBatch) -> Any:
        """Return the state of a batch if no state is known yet; None stands for zeros."""
        if self.states is not None:
            return self.states.expanded(len(batch)).tree
        return None if self._function is None else self._function(batch)

    def blend(self, batch: StreamBatch, states: States, fresh: npt.NDArray[np.bool_]) -> States:
        if self._function is not None:
            node, own = take_apart(self._function(batch), "initial(batch)")
        elif self.states is not None:
            node, own = self.states.node, [*self.states.leaves]
        else:
            rows = torch.from_numpy(np.flatnonzero(fresh))
            return states.map(lambda leaf, dim: leaf.index_fill(dim, rows.to(leaf.device, non_blocking=True), 0))
        check_same(states.node, node, "the state", "initial")
        for i, (leaf, one, of_one_lane) in enumerate(zip(states.leaves, own, states.shapes, strict=True)):
            if one.shape not in (leaf.shape, of_one_lane):
                what = f"the initial value of {names_of(node)[i]} is {tuple(one.shape)}"
                raise ValueError(f"{what}; it must be {tuple(of_one_lane)} or {tuple(leaf.shape)}")
        return states.blended(torch.from_numpy(fresh), own)


def _check_learnt(name: str, leaf: torch.Tensor) -> None:
    if isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad:
        what = f"{name} is a Parameter with requires_grad=False, which cannot learn"
        raise ValueError(f"{what}; call requires_grad_(), or pass parameter.detach()")
    if leaf.grad_fn is not None:
        what = f"{name} was computed ({leaf.grad_fn.name()}), but the first backward() frees its graph"
        raise ValueError(f"{what}; pass the Parameter itself, or a function of the batch that computes it")
