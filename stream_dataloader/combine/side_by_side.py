"""`side_by_side`: several datasets in one batch, each with lanes and a queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from stream_dataloader._engine import options
from stream_dataloader._engine.loader.iteration import CollateFn
from stream_dataloader._engine.workers.settings import WorkerMethod
from stream_dataloader.combine.dataset import SideBySide
from stream_dataloader.combine.loader import JointLoader
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import shorten

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    import torch
    from typing_extensions import Unpack

__all__ = ["side_by_side"]


class LoaderOptions(TypedDict, total=False):
    """Options of `StreamDataLoader` that `side_by_side` passes on."""

    collate_fn: CollateFn | None
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    multiprocessing_context: str | BaseContext | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float
    device: torch.device | str | int | None
    max_restarts: int
    virtual_ranks: int | None
    rank: int | None
    world_size: int | None
    process_group: Any
    worker_method: WorkerMethod
    ray_remote_args: Mapping[str, Any] | None


_KNOWN = LoaderOptions.__annotations__


def side_by_side(
    members: Iterable[tuple[StreamDataset, int]],
    num_workers: int | Sequence[int] = 0,
    *,
    ends_with: Literal["first", "longest"] | int = "first",
    batches_per_epoch: int | None = None,
    **loader_options: Unpack[LoaderOptions],
) -> StreamDataLoader[Any]:
    """Build a `StreamDataLoader` that reads several datasets in the lanes of one batch.

    Unlike `interleave`, where any lane may draw from any dataset, each dataset has lanes of its own. Streaming lanes
    and lanes of random windows in one batch are the mixed sampling of Gehrig and Scaramuzza, Recurrent Vision
    Transformers for Object Detection with Event Cameras (CVPR 2023).

    Args:
        members: Datasets, each with its number of lanes, which replaces its `batch_size`. All need the same
            `time_steps` and `context`, and items with the same structure, dtypes and shapes. All other options may
            differ. A member that ends before the epoch does is padded with its `fill_value`. With
            `padding_mode="cycle"` a member never ends: in the next epoch it goes on where it stopped.
        num_workers: Number of worker processes: one number for each member, or one number that is split by lanes, with
            at least one worker for each member. 0 reads in this process.
        ends_with: The end of an epoch: the `"first"` or the `"longest"` of the members that end, or the index of a
            member.
        batches_per_epoch: Number of batches of an epoch, if all members have `padding_mode="cycle"`. None: such a run
            has no end.
        **loader_options: As for `StreamDataLoader`; `max_restarts`, `prefetch_factor` and `timeout` apply to each
            member.

    Raises:
        ValueError: There are no members; they disagree on `time_steps`, or have none; `ends_with` is a member that
            never ends or does not exist; or an option is out of range.
        TypeError: A member is not a pair of a `StreamDataset` and a number, or an option does not exist.

    Example:
        >>> from stream_dataloader import StreamDataset, side_by_side
        >>> whole = StreamDataset(["abcde", "fgh"], iter, 1, time_steps=2)
        >>> parts = StreamDataset(["xy", "uv", "w"], iter, 1, time_steps=2, padding_mode="cycle")
        >>> for batch in side_by_side([(whole, 1), (parts, 1)]):
        ...     print(batch.member.tolist(), batch.data, batch.source_index[0].tolist())
        [0, 1] [['a', 'x'], ['b', 'y']] [0, 0]
        [0, 1] [['c', 'u'], ['d', 'v']] [0, 1]
        [0, 1] [['e', 'w'], [None, None]] [0, 2]
        [0, 1] [['f', 'x'], ['g', 'y']] [1, 0]
        [0, 1] [['h', 'u'], [None, 'v']] [1, 1]
    """
    datasets = _check_members(members)
    for number, dataset in enumerate(datasets):
        if batches_per_epoch is not None and not dataset._is_endless:
            own = f"members[{number}] ends by itself, with padding_mode={dataset._rules.padding_mode!r}"
            remedy = 'leave it out, or give all members padding_mode="cycle"'
            raise ValueError(f"batches_per_epoch is {batches_per_epoch}, and {own}; {remedy}")
    given: dict[str, Any] = {**loader_options}
    unknown = {name: value for name, value in given.items() if name not in _KNOWN}
    options.refuse_misplaced(unknown, StreamDataset, StreamDataLoader)
    return JointLoader(SideBySide(datasets, ends_with), num_workers, batches_per_epoch, given)


def _check_members(members: Any) -> list[StreamDataset]:
    """Return the members' datasets, each with its number of lanes."""
    datasets: list[StreamDataset] = []
    for number, member in enumerate(members):
        if not isinstance(member, (tuple, list)) or len(member) != 2 or not isinstance(member[0], StreamDataset):
            raise TypeError(f"members[{number}] must be (dataset, number of lanes), and is {shorten(member)}")
        dataset, lanes = member[0], options.integer(f"members[{number}][1], the number of lanes,", member[1], 1)
        rules = replace(dataset._rules, lanes=lanes)
        options.check_groups(rules)
        datasets.append(dataset._under(rules))
    if not datasets:
        raise ValueError("members is empty; pass at least one (dataset, lanes)")
    first, *_ = steps = [dataset._rules.time_steps for dataset in datasets]
    if None in steps:
        raise ValueError(f"members[{steps.index(None)}] has no time_steps; pass time_steps= to its dataset")
    for number, own in enumerate(steps):
        if own != first:
            other = f"members[{number}] time_steps={own}"
            raise ValueError(f"members[0] has time_steps={first}, and {other}; pass the same to both datasets")
        if datasets[number].context != datasets[0].context:
            other = f"members[{number}] context={datasets[number].context}"
            raise ValueError(
                f"members[0] has context={datasets[0].context}, and {other}; pass the same to both datasets"
            )
    return datasets
