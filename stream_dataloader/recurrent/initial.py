"""What a lane's state is where its stream starts: zeros, a given state, a learnt one, or a function of the batch.

Guarantee: a learnt state is part of every batch's graph, also if no stream starts in it. So its gradient is there on
each rank, which DistributedDataParallel waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._items.structure import Node, leaf_paths
from stream_dataloader.batch import StreamBatch
from stream_dataloader.recurrent.layout import dims_of
from stream_dataloader.recurrent.tree import blended, check_same, expanded, names_of, take_apart


class Initial:
    """The initial state.

    Args:
        given: None for zeros; a state of one lane; or a function of the batch, which returns the state of its lanes.
        batch_dim: The dimension of the lanes: one for all tensors, or a structure of them; None to find it out.

    Raises:
        TypeError: What is given is none of these.
        ValueError: It is not of one lane, or cannot learn.
    """

    def __init__(self, given: Any, batch_dim: Any) -> None:
        self._function: Callable[[StreamBatch], Any] | None = None
        self.node: Node | None = None
        self.leaves: list[torch.Tensor] = []
        self.dims: list[int] = []
        if isinstance(given, torch.Tensor) or not callable(given):
            if given is not None:
                self.node, self.leaves = take_apart(given, "initial")
                self.dims = dims_of(self.node, self.leaves, 1, batch_dim, "initial")
        else:
            self._function = given
        for name, leaf in zip(leaf_paths(self.node, "initial") if self.node else [], self.leaves, strict=True):
            _check_learnt(name, leaf)
        self.is_learnt = any(leaf.requires_grad for leaf in self.leaves)

    @property
    def is_zero(self) -> bool:
        """Lanes start with zeros."""
        return self.node is None and self._function is None

    @property
    def is_in_every_graph(self) -> bool:
        """It is computed for every batch."""
        return torch.is_grad_enabled() and (self.is_learnt or self._function is not None)

    def to(self, device: torch.device) -> None:
        """Move it, unless it is learnt: Parameters go with their module."""
        self.leaves = [leaf if leaf.requires_grad else leaf.to(device) for leaf in self.leaves]

    def of(self, batch: StreamBatch) -> tuple[Node, list[torch.Tensor]]:
        """The structure, and tensors of one lane, or of all of the batch's lanes; not for zeros."""
        if self._function is not None:
            return take_apart(self._function(batch), "initial(batch)")
        assert self.node is not None
        return self.node, self.leaves

    def begin(self, batch: StreamBatch) -> tuple[Node, list[torch.Tensor]]:
        """The structure, and tensors of all of the batch's lanes; not for zeros."""
        node, leaves = self.of(batch)
        return node, leaves if self._function is not None else expanded(leaves, self.dims, len(batch))

    def blend(
        self,
        batch: StreamBatch,
        node: Node,
        leaves: Sequence[torch.Tensor],
        dims: Sequence[int],
        fresh: npt.NDArray[np.bool_],
    ) -> list[torch.Tensor]:
        """States in which some lanes have the initial value.

        Args:
            batch: The batch.
            node: The structure of the states.
            leaves: The states.
            dims: The dimension of the lanes in each.
            fresh: `(B,)` bool: which lanes.
        """
        if self.is_zero:
            rows = torch.from_numpy(np.flatnonzero(fresh))
            return [
                leaf.index_fill(dim, rows.to(leaf.device, non_blocking=True), 0)
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
        own_node, own = self.of(batch)
        check_same(node, own_node, "the state", "initial")
        for name, leaf, one, dim in zip(names_of(node), leaves, own, dims, strict=True):
            _check_fits(name, leaf, one, dim)
        return blended(torch.from_numpy(fresh), own, leaves, dims)


def _check_fits(name: str, leaf: torch.Tensor, one: torch.Tensor, dim: int) -> None:
    """Raise unless an initial value has the shape of a state, or that of one lane."""
    of_one_lane = tuple(1 if i == dim else size for i, size in enumerate(leaf.shape))
    if tuple(one.shape) not in {tuple(leaf.shape), of_one_lane}:
        raise ValueError(
            f"the initial value of {name} is {tuple(one.shape)}, which does not fit {tuple(leaf.shape)}; give the "
            "model's own state, with 1 in the dimension of the lanes"
        )


def _check_learnt(name: str, leaf: torch.Tensor) -> None:
    if isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad:
        raise ValueError(
            f"{name} is a Parameter with requires_grad=False, which learns nothing; call requires_grad_(), or pass "
            "parameter.detach() for a fixed value"
        )
    if leaf.grad_fn is not None:
        raise ValueError(
            f"{name} was computed from other tensors ({leaf.grad_fn.name()}), and the first backward() frees that "
            "graph; pass the Parameter itself, or a function of the batch that computes it"
        )
