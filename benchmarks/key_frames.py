"""Key frames of an episode: a policy that has to repeat what two lamps showed, fed in five ways.

    python benchmarks/key_frames.py [--quick] [--runs 5] [--jobs 2] [--out docs/assets]

In each episode two lamps shine for 5 of 32 to 120 steps, red or green: one at the start, one somewhere in the middle.
The last 8 actions have to repeat both colours. The policy looks at every fifth step, from one that is drawn in each
epoch, and predicts 8 actions there. It attends to a bank of at most 6 earlier steps, from which steps without a lamp
go first. The policy, the episodes, the number of epochs and of steps in a batch are the same in all ways; what differs
is which steps share a batch, and what is in the bank. In a second task both colours are shown again at the end, so that
there is nothing to remember.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from proof import (
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    figure_of,
    options_of,
    panels,
    side_by_side,
    span,
    table,
    take_step,
    told,
    write,
)
from torch import Tensor, nn

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.recurrent import LaneMemory

EVERY, HORIZON, TIME_STEPS, LANES, KEPT = 5, 8, 4, 8, 6
FIRST_UNSEEN = 10_000
#: How the policy is fed, and what the page calls it.
WAYS = {
    "lanes": "lanes, the bank goes on with its lane",
    "mixed": "anchors of all episodes mixed, each with the bank of its whole past",
    "dealt, whole banks": "an episode's anchors dealt over the rows, each with the bank of its whole past",
    "dealt": "an episode's anchors dealt over the rows, a bank of each row",
    "no bank": "lanes, no bank",
}
_COLOURS = {"lanes": BLUE, "mixed": GREEN, "dealt, whole banks": GREEN, "dealt": VERMILION, "no bank": GREY}

Bank = list[tuple[Tensor, bool]]  #: steps, and whether a lamp shone


class Episode(NamedTuple):
    """An episode: `(steps, 6)` seen, and `(steps, 2)` actions."""

    seen: Tensor
    actions: Tensor

    @property
    def anchors(self) -> int:
        """Number of steps at which the policy is asked."""
        return len(self.seen) // EVERY


@cache
def episode(number: int, told_at_end: bool) -> Episode:
    """Draw an episode: time, two lamps, whether to repeat them, and two that show both colours again if asked to."""
    rng = np.random.default_rng(number)
    steps = int(np.clip(rng.lognormal(3.7, 0.45), 32, 120))
    colours = rng.choice([-1.0, 1.0], 2)
    middle, at = int(rng.integers(6, steps - 2 * HORIZON - 4)), np.arange(steps)
    asks = at > steps - 2 * HORIZON  # wherever the next 8 actions have one of the last 8
    first, second = colours[0] * (at < 5), colours[1] * ((at >= middle) & (at < middle + 5))
    again = [colour * asks * told_at_end for colour in colours]
    seen = np.stack([at / 120, first, second, asks, *again], 1)
    actions = np.stack([colour * (at >= steps - HORIZON) for colour in colours], 1)
    return Episode(torch.tensor(seen, dtype=torch.float32), torch.tensor(actions, dtype=torch.float32))


def chunk(of: Episode, frame: int) -> dict[str, Any]:
    """Return what the policy sees at a step, and the actions from there on."""
    ahead = torch.arange(frame, frame + HORIZON)
    is_there = ahead < len(of.seen)
    return {"seen": of.seen[frame], "actions": of.actions[ahead.clamp(max=len(of.seen) - 1)], "is_there": is_there}


def open_chunks(told_at_end: bool, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an episode; the first step is drawn anew in each epoch."""
    own = episode(number, told_at_end)
    phase = int(get_stream_info().rng.integers(EVERY))
    return (chunk(own, phase + EVERY * i) for i in range(start, own.anchors))


def note(bank: Bank, seen: Tensor) -> None:
    """Put a step into a bank; steps without a lamp go first."""
    bank.append((seen, bool(seen[1:3].abs().max() > 0.5)))
    if len(bank) > KEPT:
        bank.pop(next((i for i, (_, is_key) in enumerate(bank) if not is_key), 0))


class Policy(nn.Module):
    """Attends from the step to its bank; `(B, HORIZON, 2)` of actions."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.eye = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, features))
        self.query, self.key, self.value = (nn.Linear(features, features) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(2 * features, 64), nn.ReLU(), nn.Linear(64, HORIZON * 2))

    def forward(self, seen: Tensor, banks: Sequence[Bank | None]) -> Tensor:
        most = max(1, *(len(bank or ()) for bank in banks))
        past, there = torch.zeros(len(seen), most, 6), torch.zeros(len(seen), most, dtype=torch.bool)
        for row, bank in enumerate(banks):
            if bank:
                past[row, : len(bank)] = torch.stack([step for step, _ in bank])
                there[row, : len(bank)] = True
        now, before = self.eye(seen), self.eye(past)
        scores = (self.key(before) @ self.query(now)[..., None])[..., 0] / now.shape[1] ** 0.5
        weights = scores.masked_fill(~there, -1e9).softmax(1) * there
        recalled = (weights[..., None] * self.value(before)).sum(1)
        out: Tensor = self.head(torch.cat([now, recalled], 1)).view(-1, HORIZON, 2)
        return out


class Fed(NamedTuple):
    """Input of one step of the optimiser, or of the test: rows of chunks, each with its bank."""

    predicted: Tensor
    actions: Tensor
    is_there: Tensor


Model = Callable[[Tensor, Sequence[Bank | None]], Tensor]


def dataset_of(numbers: Sequence[int], told_at_end: bool, **options: Any) -> StreamDataset:
    """Make the streams of chunks."""
    counts = [episode(number, told_at_end).anchors for number in numbers]
    return StreamDataset(
        numbers, partial(open_chunks, told_at_end), LANES, time_steps=TIME_STEPS, lengths=counts, **options
    )


def window(model: Model, memory: LaneMemory[Bank], batch: StreamBatch, *, remembers: bool) -> Fed:
    """Run the policy on a batch of lanes."""
    predicted = []
    for t, banks in memory.steps(batch):
        predicted.append(model(batch.data["seen"][t], banks))
        for bank, seen in zip(banks, batch.data["seen"][t], strict=True):
            if bank is not None and remembers:
                note(bank, seen)
    is_there = batch.data["is_there"] & batch.mask[..., None]
    return Fed(torch.stack(predicted).flatten(0, 1), batch.data["actions"].flatten(0, 1), is_there.flatten(0, 1))


def in_lanes(model: Model, loader: Iterable[StreamBatch], *, remembers: bool) -> Iterator[Fed]:
    """Feed batches of lanes, with a bank of each lane."""
    memory: LaneMemory[Bank] = LaneMemory()
    return (window(model, memory, batch, remembers=remembers) for batch in loader)


class Anchor(NamedTuple):
    """A chunk with its episode, and the bank of its whole past."""

    episode: int
    chunk: dict[str, Any]
    past: Bank


def anchors_in_turn(dataset: StreamDataset, seed: int, epoch: int) -> list[Anchor]:
    """Return the chunks of an epoch, one episode after the other, in the order in which lanes would take them."""
    given: dict[str, Any] = {"shuffle": True, "seed": seed, "lengths": dataset.lengths}
    alone = StreamDataset(dataset.sources, dataset.open_stream, 1, time_steps=64, windows="packed", **given)
    loader = StreamDataLoader(alone)
    bank: Bank = []
    found: list[Anchor] = []
    loader.set_epoch(epoch)
    for batch in loader:
        for t in range(int(batch.mask.sum())):
            bank = [] if batch.is_first[t, 0] else bank
            one = {name: leaf[t, 0] for name, leaf in batch.data.items()}
            found.append(Anchor(int(batch.source_index[t, 0]), one, list(bank)))
            note(bank, one["seen"])
    return found


def dealt(model: Model, anchors: Sequence[Anchor], *, whole_banks: bool) -> Iterator[Fed]:
    """Feed the list of anchors as rows of `LANES`, `TIME_STEPS` times for a batch.

    A row's own bank is emptied where its episode changes, as `SequentialEpisodeBatchSampler` of InternRobotics/EventVLA
    and its model do by default: the anchors of an episode are then spread over the rows.
    """
    banks: list[Bank] = [[] for _ in range(LANES)]
    owners = [-1] * LANES
    for begin in range(0, len(anchors) - LANES * TIME_STEPS + 1, LANES * TIME_STEPS):
        predicted, rows = [], anchors[begin : begin + LANES * TIME_STEPS]
        for first in range(0, len(rows), LANES):
            own = rows[first : first + LANES]
            for row, anchor in enumerate(own):
                if owners[row] != anchor.episode:
                    owners[row], banks[row] = anchor.episode, []
            seen = torch.stack([anchor.chunk["seen"] for anchor in own])
            predicted.append(model(seen, [anchor.past for anchor in own] if whole_banks else banks))
            for bank, step in zip(banks, seen, strict=True):
                note(bank, step)
        actions, is_there = (torch.stack([anchor.chunk[name] for anchor in rows]) for name in ("actions", "is_there"))
        yield Fed(torch.cat(predicted), actions, is_there)


class Task(NamedTuple):
    """One training and its test, in a process of its own."""

    way: str
    told_at_end: bool
    seed: int
    epochs: int
    learned: int
    unseen: int


def batches_of(task: Task, model: Model, dataset: StreamDataset, loader: Any, epoch: int) -> Iterator[Fed]:
    """Feed one epoch in one of the ways."""
    if task.way in ("lanes", "no bank"):
        return in_lanes(model, loader, remembers=task.way == "lanes")
    anchors = anchors_in_turn(dataset, task.seed, epoch)
    if task.way == "mixed":
        order = np.random.default_rng([task.seed, epoch]).permutation(len(anchors))
        anchors = [anchors[i] for i in order]
    return dealt(model, anchors, whole_banks=task.way != "dealt")


def run(task: Task) -> float:
    """Return the share of the last actions of unseen episodes that repeat both colours."""
    torch.manual_seed(task.seed)
    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    dataset = dataset_of(range(task.learned), task.told_at_end, shuffle=True, seed=task.seed)
    loader = StreamDataLoader(dataset)
    for epoch in range(task.epochs):
        for fed in batches_of(task, model, dataset, loader, epoch):
            loss = (fed.predicted - fed.actions)[fed.is_there].square().mean()
            take_step(model, optimizer, loss)
    return tested(model, task)


@torch.no_grad()
def tested(model: Policy, task: Task) -> float:
    """Play unseen episodes in lanes, as a robot would, with a bank of each lane."""
    unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + task.unseen)
    loader = StreamDataLoader(dataset_of(unseen, task.told_at_end, seed=0))
    hits = asked = 0
    for fed in in_lanes(model, loader, remembers=task.way != "no bank"):
        last = fed.is_there & (fed.actions.abs() > 0.5).all(-1)
        hits += int((fed.predicted.sign() == fed.actions)[last].all(-1).sum())
        asked += int(last.sum())
    return hits / asked


def numbers_of(tasks: list[Task], outcomes: list[float]) -> dict[str, Any]:
    """Return the numbers to draw and print."""
    found: dict[str, Any] = {"epochs": tasks[0].epochs, "episodes": [tasks[0].learned, tasks[0].unseen]}
    for name, told_at_end in (("to remember", False), ("told at the end", True)):
        found[name] = {}
        for way in WAYS:
            of_way = [
                out
                for task, out in zip(tasks, outcomes, strict=True)
                if (task.way, task.told_at_end) == (way, told_at_end)
            ]
            found[name][way] = {**span(of_way), "runs": len(of_way)}
    return found


def tables(numbers: dict[str, Any]) -> list[str]:
    """The table of the page, in Markdown."""
    head = ["fed in training", "both colours right", "the same, told at the end"]
    rows = [
        [text, *(told(numbers[name][way], 2) for name in ("to remember", "told at the end"))]
        for way, text in WAYS.items()
    ]
    return [table(head, rows)]


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Means with bars from the lowest to the highest, for both tasks."""
    image, axes = panels(2, width=9, height=3.2, sharey=True)
    for one, (name, title) in zip(
        axes,
        (("to remember", "shown early, asked at the end"), ("told at the end", "shown again at the end")),
        strict=True,
    ):
        for row, way in enumerate(reversed(WAYS)):
            cell = numbers[name][way]
            error = [[cell["mean"] - cell["low"]], [cell["high"] - cell["mean"]]]
            one.errorbar(cell["mean"], row, xerr=error, fmt="o", color=_COLOURS[way], capsize=4)
        one.axvline(0.25, color=GREY, linestyle=":")
        one.set_yticks(range(len(WAYS)), list(reversed(WAYS)))
        one.set_xlim(0, 1.04)
        one.set_xlabel("both colours right (share of the last actions)")
        one.set_title(title, fontsize=10)
    axes[0].text(0.26, len(WAYS) - 1.4, "guessing", fontsize=8, color=GREY)
    image.savefig(path)


def main() -> None:
    """Train, test, draw."""
    options = options_of("A policy with a bank of key frames, fed in five ways.", full_runs=5)
    epochs, learned, unseen = (1, 12, 4) if options.quick else (15, 400, 100)
    tasks = [
        Task(way, told_at_end, seed, epochs, learned, unseen)
        for told_at_end, runs in ((False, options.runs), (True, min(options.runs, 3)))
        for seed in range(runs)
        for way in WAYS
    ]
    numbers = numbers_of(tasks, side_by_side(run, tasks, options.jobs, options.keep))
    draw(numbers, options.out / "key_frames.png")
    print("\n\n".join(tables(numbers)))
    section = "share of the last actions that repeat both colours"
    rows = [figure_of(section, text, numbers["to remember"][way], "of 1") for way, text in WAYS.items()]
    write(options, "key_frames", numbers, rows)


if __name__ == "__main__":
    main()
