"""Follows a disc seen by an event camera: voxel grids, labels at few of them, and a ConvLSTM whose state is carried.

    python examples/event_camera.py [--workers 2] [--epochs 5]

An event camera takes no pictures. Each pixel reports by itself when it gets brighter or darker: (t, x, y, polarity).
The example makes recordings of that kind, of uneven durations, and writes them to files in the way of Prophesee's data
sets: the events, and boxes at few times. Now and then the disc stands still. Then there are no events but noise, and
only a carried state knows where it is.

It trains twice: on whole batches, and on the parts of each worker, with a state for each worker as in Recurrent Vision
Transformers (Gehrig and Scaramuzza, CVPR 2023, arXiv 2212.05598).
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

HEIGHT, WIDTH = 24, 32
GRID_US = 50_000  # each voxel grid holds the events of 50 ms
BINS = 3  # how finely it divides them in time
TIME_STEPS = 10  # voxel grids in a window
LANES = 8
RADIUS = 3.0  # of the disc, in pixels

# the fields, names and units of Prophesee's files: t in microseconds, p 1 for brighter and 0 for darker
EVENT = np.dtype([("x", "<u2"), ("y", "<u2"), ("p", "<i2"), ("t", "<i8")])
BOX = np.dtype([("t", "<i8"), ("x", "<f4"), ("y", "<f4"), ("w", "<f4"), ("h", "<f4"), ("class_id", "<u4")])

Window = dict[str, NDArray[np.generic]]


def simulate(rng: np.random.Generator) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """A recording: events in order of time, and a box every 250 ms."""
    milliseconds = int(rng.integers(1000, 4000))
    moves = np.repeat(rng.random(milliseconds // 300 + 1) < 0.7, 300)[:milliseconds]  # else it stands still
    room = np.array([WIDTH, HEIGHT]) - 1 - 2 * RADIUS
    way = rng.random(2) * room + np.cumsum(moves)[:, None] * rng.uniform(0.01, 0.04, 2)
    centre = RADIUS + room - np.abs(way % (2 * room) - room)  # it bounces off the borders

    # a pixel sends an event when the edge of the disc passes it: the disc is bright, the background dark
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    bright = np.hypot(x - centre[:, 0, None, None], y - centre[:, 1, None, None]) < RADIUS
    change = np.diff(bright.astype(np.int8), axis=0)
    when, rows, columns = np.nonzero(change)
    noise = rng.integers(0, [[milliseconds], [HEIGHT], [WIDTH], [2]], (4, milliseconds // 20))
    events = np.empty(len(when) + noise.shape[1], EVENT)
    events["t"] = np.append(when, noise[0]) * 1000 + rng.integers(0, 1000, len(events))
    events["y"] = np.append(rows, noise[1])
    events["x"] = np.append(columns, noise[2])
    events["p"] = np.append(change[when, rows, columns] > 0, noise[3])
    events.sort(order="t")

    times = np.arange(rng.integers(60, 250), milliseconds, 250)
    boxes = np.zeros(len(times), BOX)
    boxes["t"] = times * 1000
    boxes["x"], boxes["y"] = centre[times].T - RADIUS
    boxes["w"] = boxes["h"] = 2 * RADIUS
    return events, boxes


def write_recordings(folder: Path, count: int) -> list[str]:
    """Make recordings; returns the files of events. The boxes of each are beside it."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        events, boxes = simulate(rng)
        np.save(folder / f"{number:02}_td.npy", events)
        np.save(folder / f"{number:02}_bbox.npy", boxes)
        paths.append(str(folder / f"{number:02}_td.npy"))
    return paths


def voxel_grids(events: NDArray[np.void], start_us: int, steps: int) -> NDArray[np.float32]:
    """Voxel grids `(steps, BINS, HEIGHT, WIDTH)` of the events in `[start_us, start_us + steps * GRID_US)`.

    An event adds its polarity, -1 or 1, to the two bins next to its time, the more the nearer it is to them: the event
    volume of Zhu, Yuan, Chaney and Daniilidis, Unsupervised Event-based Learning of Optical Flow, Depth and Egomotion,
    CVPR 2019, arXiv 1812.08156, section 3.1. Time counts from the start of the grid, not from its first event.
    """
    step, within_us = np.divmod(events["t"] - start_us, GRID_US)
    bin_time = within_us * ((BINS - 1) / GRID_US)  # less than BINS - 1, so the bin after it is there
    left = bin_time.astype(np.int64)
    cell = ((step * BINS + left) * HEIGHT + events["y"]) * WIDTH + events["x"]
    polarity, later = 2.0 * events["p"] - 1, bin_time - left
    size = steps * BINS * HEIGHT * WIDTH
    grids = np.bincount(cell, polarity * (1 - later), size)
    grids += np.bincount(cell + HEIGHT * WIDTH, polarity * later, size)
    return grids.reshape(steps, BINS, HEIGHT, WIDTH).astype(np.float32)


def open_recording(path: str, start: int = 0) -> Iterator[Window]:
    """One stream: windows of up to `TIME_STEPS` voxel grids, with the disc's centre at the few steps that have a box.

    Args:
        path: The file of events.
        start: The first window wanted, so that a resumed run need not read what comes before.
    """
    events = np.load(path, mmap_mode="r")  # only the events of the window are read
    boxes = np.load(path.replace("_td.npy", "_bbox.npy"))
    grids = int(events["t"][-1]) // GRID_US + 1
    ends = np.searchsorted(events["t"], np.arange(grids + 1) * GRID_US)  # where the events of each grid begin
    box_step = np.ceil(boxes["t"] / GRID_US).astype(np.int64) - 1  # the grid that holds what came before the box

    for first in range(start * TIME_STEPS, grids, TIME_STEPS):
        steps = min(TIME_STEPS, grids - first)  # the last window may be shorter: the loader pads and masks it
        centre = np.zeros((steps, 2), np.float32)
        labelled = np.zeros(steps, np.bool_)
        own = (first <= box_step) & (box_step < first + steps)
        box, at = boxes[own], box_step[own] - first
        centre[at] = np.stack([box["x"] + box["w"] / 2, box["y"] + box["h"] / 2], axis=1)
        labelled[at] = True
        window = events[ends[first] : ends[first + steps]]
        yield {"voxels": voxel_grids(window, first * GRID_US, steps), "centre": centre, "labelled": labelled}


State = tuple[Tensor, Tensor]


class Tracker(nn.Module):
    """A convolution, a ConvLSTM, and the place where the map that comes out is brightest.

    The ConvLSTM is that of Shi and others, Convolutional LSTM Network, NeurIPS 2015, arXiv 1506.04214, without the
    peepholes. Its state is an argument and a result, so that the training loop carries it.

    Args:
        features: Channels of the state.
    """

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.features = features
        self.encode = nn.Conv2d(BINS, features, 3, stride=2, padding=1)
        self.gates = nn.Conv2d(2 * features, 4 * features, 3, padding=1)
        self.head = nn.Conv2d(features, 1, 1)

    def forward(self, voxels: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Centres `(T, B, 2)` for voxel grids `(T, B, BINS, H, W)`, and the state: two tensors `(B, F, H/2, W/2)`."""
        time_steps, lanes = voxels.shape[:2]
        encoded = self.encode(voxels.flatten(0, 1)).relu().unflatten(0, (time_steps, lanes))
        hidden, memory = state if state is not None else (torch.zeros_like(encoded[0]), torch.zeros_like(encoded[0]))
        outputs = []
        for now in encoded:
            keep, add, show, new = self.gates(torch.cat([now, hidden], 1)).chunk(4, 1)
            memory = (keep + 1).sigmoid() * memory + add.sigmoid() * new.tanh()  # + 1: at first it remembers
            hidden = show.sigmoid() * memory.tanh()
            outputs.append(hidden)
        bright = self.head(torch.cat(outputs)).flatten(1).softmax(1).view(time_steps, lanes, *hidden.shape[-2:])
        x = (bright.sum(2) * torch.arange(0.5, WIDTH, 2)).sum(-1)  # the mean place of the cells, two pixels wide
        y = (bright.sum(3) * torch.arange(0.5, HEIGHT, 2)).sum(-1)
        return torch.stack([x, y], -1), (hidden, memory)


def train_step(
    model: Tracker, optimizer: torch.optim.Optimizer, carry: RecurrentState, batch: StreamBatch
) -> tuple[float, int]:
    """One step on a batch or a part: the sum of the distances in pixels, and the number of labels."""
    state = carry.before(batch)  # zeros where a recording starts, else what `after` kept
    centre, state = model(batch.data["voxels"], state)
    carry.after(batch, state)  # detached: truncated back-propagation through time
    chosen = batch.data["labelled"] & batch.mask  # padding has no labels, and most grids have none either
    labels = int(chosen.sum())
    if not labels:
        return 0.0, 0  # nothing to learn from, but the state went on
    distance = (centre - batch.data["centre"])[chosen].norm(dim=-1)
    optimizer.zero_grad()
    distance.mean().backward()
    optimizer.step()
    return float(distance.detach().sum()), labels


def show(batch: StreamBatch, whose: str) -> None:
    """Content of a batch or part."""
    shape, labels = tuple(batch.data["voxels"].shape), int((batch.data["labelled"] & batch.mask).sum())
    print(
        f"  step {batch.batch_index}, {whose}: voxels {shape}, {labels} labels in {int(batch.mask.sum())} grids, ",
        end="",
    )
    print(f"reset {batch.reset.int().tolist()}")


def train(paths: list[str], workers: int, epochs: int, *, by_part: bool) -> None:
    """Train a new model, and print the mean distance of each epoch."""
    torch.manual_seed(0)
    dataset = StreamDataset(paths, open_recording, LANES, windows="given", shuffle=True, seed=0)
    loader = StreamDataLoader(dataset, workers)
    model = Tracker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # One RecurrentState would do for all parts, since it keeps states by lane. By worker it is what RVT has.
    carries = defaultdict[int, RecurrentState](lambda: RecurrentState(batch_dim=0))
    for epoch in range(epochs):
        total, labels = 0.0, 0
        batches: Iterable[StreamBatch] = loader.parts() if by_part else loader
        for batch in batches:
            if epoch == 0 and batch.batch_index < 3:
                show(batch, f"worker {batch.worker}" if by_part else "all workers")
            carry = carries[batch.worker] if by_part else carries[0]
            distance, count = train_step(model, optimizer, carry, batch)
            total, labels = total + distance, labels + count
        print(f"  epoch {epoch}: {total / labels:.2f} pixels off, {labels} labels")


def main() -> None:
    """Make the recordings, and train both ways."""
    parser = argparse.ArgumentParser(description="Follows a disc seen by an event camera.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--recordings", type=int, default=20)
    options = parser.parse_args()

    with TemporaryDirectory() as folder:
        paths = write_recordings(Path(folder), options.recordings)
        seconds = [np.load(path, mmap_mode="r")["t"][-1] / 1e6 for path in paths]
        events = sum(len(np.load(path, mmap_mode="r")) for path in paths)
        print(f"{len(paths)} recordings of {min(seconds):.1f} to {max(seconds):.1f} s, {events} events")
        print("whole batches, one state:")
        train(paths, options.workers, options.epochs, by_part=False)
        print("parts, a state for each worker:")
        train(paths, options.workers, options.epochs, by_part=True)


if __name__ == "__main__":
    main()
