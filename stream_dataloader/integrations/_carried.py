"""`Carried`: the states that a model carries, in checkpoints that one rank writes for all.

Guarantee: a rank loads its own lanes' states, also if there were another number of ranks; those that a checkpoint has
are as of the batch that its loader's state is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.checkpoint import merge_states
from stream_dataloader.recurrent.state import RecurrentState


class Carried:
    """What a model carries: one `RecurrentState`, several, or none.

    Args:
        carry: As a user gives it.

    Raises:
        TypeError: It is something else.
    """

    def __init__(self, carry: RecurrentState | Iterable[RecurrentState] | None) -> None:
        self._all = [carry] if isinstance(carry, RecurrentState) else list(carry or ())
        for one in self._all:
            if not isinstance(one, RecurrentState):
                raise TypeError(f"carry must be a RecurrentState, or a list of them, and has a {type(one).__name__}")

    def __bool__(self) -> bool:
        return bool(self._all)

    def state_dict(self) -> list[dict[str, Any]]:
        """This rank's, in host memory."""
        states = [carry.state_dict() for carry in self._all]
        return [state | {"leaves": [leaf.cpu() for leaf in state["leaves"]]} for state in states]

    def snapshot(self) -> Carried:
        """What is carried now, and stays so."""
        return Carried([carry.snapshot() for carry in self._all])

    def load(self, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Load what ranks had.

        Args:
            ranks: What `state_dict` gave on each of them. Some may be there several times, as model-parallel ones are.
        """
        if any(len(states) != len(self._all) for states in ranks):
            raise StateError(
                f"the checkpoint has {len(ranks[0])} carried states, and here are {len(self._all)}; pass those as "
                "carry= that were there when it was saved, in the same order"
            )
        for carry, states in zip(self._all, zip(*ranks, strict=True), strict=True):
            by_rank = {state["rank"]: state for state in states}
            own = by_rank.get(carry.place[0])
            is_own = own is not None and own["world_size"] == carry.place[1]
            carry.load_state_dict(own if own is not None and is_own else merge_states(by_rank.values()))

    def reset(self) -> None:
        """Forget all."""
        for carry in self._all:
            carry.reset()
