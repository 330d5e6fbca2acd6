"""Batches for a language model from text files: characters (or bytes), and for each the one that follows.

    python examples/text_files.py [FILE ...] [--units characters] [--lanes 3] [--time-steps 24] [--batches 4]

Without files, two are written to a temporary folder. Each file is cut into sections, so that there is something
to read for all lanes; a lane's input goes on from batch to batch, and its target is the input shifted by one.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.streams import TextStream


def write_files(folder: Path) -> list[Path]:
    """Two text files: the first topics of `help()`, and the next ones."""
    names = sorted(topics)
    files = [folder / "first.txt", folder / "second.txt"]
    for file, part in zip(files, (names[:10], names[10:20]), strict=True):
        file.write_text("\n".join(topics[name] for name in part), encoding="utf-8")
    return files


def sections(files: Sequence[Path], section_bytes: int) -> list[tuple[Path, int, int]]:
    """All bytes of the files, in sections; it does not matter where one ends, in the middle of a character even."""
    return [
        (file, start, min(start + section_bytes, size))
        for file in files
        for size in [os.path.getsize(file)]
        for start in range(0, size, section_bytes)
    ]


def lane_text(batch: StreamBatch, key: str, lane: int) -> str:
    """The text that a lane reads, or predicts, in this batch, without padding."""
    codes = batch.data[key][:, lane][batch.mask[:, lane]]
    return "".join(chr(code) for code in codes.tolist() if code >= 0).replace("\n", "\\")  # the last target is -100


def main() -> None:
    """Print the first batches of an epoch."""
    parser = argparse.ArgumentParser(description="Prints inputs and targets, lane by lane.")
    parser.add_argument("files", nargs="*", type=Path, help="text files; without, two are made")
    parser.add_argument("--units", choices=["characters", "bytes"], default="characters")
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--time-steps", type=int, default=24)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--section-bytes", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        files = options.files or write_files(Path(folder))
        dataset = StreamDataset(
            sections(files, options.section_bytes),
            TextStream(units=options.units, targets=True),
            batch_size=options.lanes,
            time_steps=options.time_steps,
        )
        for batch in islice(StreamDataLoader(dataset, num_workers=options.workers), options.batches):
            print(f"batch {batch.batch_index}: {tuple(batch.data['input'].shape)} {batch.data['input'].dtype}")
            for lane in range(len(batch)):
                print(f"  lane {lane} input  {lane_text(batch, 'input', lane)}")
                print(f"         target {lane_text(batch, 'target', lane)}")


if __name__ == "__main__":
    main()
