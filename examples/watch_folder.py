"""Trains on a folder while recordings arrive in it: each new file joins at the next pass over the list.

    python examples/watch_folder.py [FOLDER] [--batches 60]

A recording is a `.npy` file of shape (steps, features). Without a folder, one is made, and a thread writes files to it.
"""

import argparse
import pathlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from stream_dataloader import RecurrentState, StreamDataLoader, StreamDataset

FEATURES = 4


def open_recording(path: str, start: int = 0) -> Iterator[np.ndarray]:
    """Yield the steps of a recording."""
    yield from np.load(path, mmap_mode="r")[start:]


def record(folder: pathlib.Path, number: int) -> None:
    """Write a recording under another name first: a file that is there is complete."""
    steps = np.random.default_rng(number).normal(size=(20 + 5 * number, FEATURES)).astype(np.float32)
    draft = folder / f"{number:03}.part"
    with draft.open("wb") as file:
        np.save(file, steps)
    draft.rename(folder / f"{number:03}.npy")


def recordings(folder: pathlib.Path) -> list[str]:
    """List the files in an order that does not change when others arrive: by name."""
    return sorted(map(str, folder.glob("*.npy")))


def main() -> None:
    """Train, and print how many recordings there are and were read."""
    parser = argparse.ArgumentParser(description="Trains on a folder while recordings arrive in it.")
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--batches", type=int, default=60)
    options = parser.parse_args()
    folder = options.folder or pathlib.Path(tempfile.mkdtemp())

    def write() -> None:
        for number in range(4, 10):
            time.sleep(0.05)
            record(folder, number)

    if options.folder is None:
        for number in range(4):
            record(folder, number)
        threading.Thread(target=write, daemon=True).start()

    known = recordings(folder)
    dataset = StreamDataset(known, open_recording, 4, "cycle", time_steps=16, shuffle=True, seed=0)
    loader = StreamDataLoader(dataset, num_workers=2)
    model, carry = torch.nn.GRU(FEATURES, FEATURES), RecurrentState(batch_dim=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    read: Counter[str] = Counter()
    for batch in loader:
        output, state = model(batch.data, carry.before(batch))
        carry.after(batch, state)
        loss = (output[:-1] - batch.data[1:]).square()[batch.mask[1:]].mean()  # predicts the next step; a toy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        read.update(dataset.sources[i] for i in batch.source_index[batch.is_first].tolist())
        if batch.batch_index % 10 == 0:
            print(f"batch {batch.batch_index}: {len(dataset.sources)} recordings, {len(read)} read, loss {loss:.3f}")
        if batch.batch_index + 1 == options.batches:
            break
        if arrived := recordings(folder)[len(dataset.sources) :]:  # names ascend, so new ones are at the end
            dataset.extend(arrived)
    print(f"read {len(read)} of {len(dataset.sources)} recordings, each at least {min(read.values())} times")


if __name__ == "__main__":
    main()
