"""The rank of this process, the number of ranks, and the identity of their group."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch.distributed as dist

from stream_dataloader._engine import options


class RankInfo(NamedTuple):
    """This process among the ranks that share an epoch.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        peers: Name of this set of ranks, as there may be several sets.
        among_others: Whether torch.distributed has other processes, and it is not known which share the epoch.
    """

    rank: int = 0
    world_size: int = 1
    peers: str = ""
    among_others: bool = False


def is_started() -> bool:
    """Return whether torch.distributed is running."""
    return dist.is_available() and dist.is_initialized()


def find_rank(rank: int | None, world_size: int | None, process_group: Any) -> RankInfo:
    """Find this process's rank: as given, or from torch.distributed, or alone."""
    if rank is not None and world_size is not None:
        among_others = is_started() and world_size != dist.get_world_size()
        return RankInfo(rank, world_size, f"ranks of {world_size}", among_others)
    if not is_started():
        if process_group is not None:
            raise ValueError("process_group= needs torch.distributed: call init_process_group() before iterating")
        return RankInfo()
    group = process_group
    if hasattr(process_group, "get_group"):
        if process_group.ndim != 1:
            names = process_group.mesh_dim_names
            what = f"process_group is a DeviceMesh of {process_group.ndim} dimensions {names or ''}"
            raise ValueError(f'{what}; pass the dimension of data parallelism: mesh["data"]')
        group = process_group.get_group()
    own = dist.get_rank(group)
    if own < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group; pass a group that contains it")
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    peers = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest() if ranks else "all"
    return RankInfo(own, dist.get_world_size(group), peers)


class OwnRank:
    """The rank of this process, remembered after torch.distributed has ended."""

    def __init__(self, rank: int | None, world_size: int | None, process_group: Any = None) -> None:
        options.check_ranks(None, rank, world_size, process_group)
        self._given = rank, world_size, process_group
        self._latest = RankInfo()

    def now(self) -> RankInfo:
        if self._latest.world_size == 1 or is_started():
            self._latest = find_rank(*self._given)
        return self._latest

    @property
    def numbers(self) -> tuple[int, int]:
        """The rank, and the number of ranks."""
        now = self.now()
        return now.rank, now.world_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_latest": RankInfo()}
