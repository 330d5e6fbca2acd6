"""Streams text, a character a time step, and prints the batches lane by lane.

    python examples/text.py [FILE] [--lanes 4] [--time-steps 48] [--batches 6] [--workers 2]

Read one lane's lines from batch to batch: each goes on where it stopped, in the middle of a word if need be.
"»" marks the first character of a paragraph, where a recurrent network would zero its hidden state.
"""

import argparse
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset


def python_documentation() -> str:
    """The topics of `help()`, their headings as paragraphs of their own."""
    return re.sub(r"\n([*=-])\1+\n", "\n\n", "\n\n".join(topics.values()))


def split_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each on one line."""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def open_paragraph(paragraph: str) -> Iterator[int]:
    """One stream: yields one time step after another, here a character's code."""
    for character in paragraph:
        yield ord(character)


def lane_text(batch: StreamBatch, lane: int) -> str:
    """The text that a lane read in this batch, with starts of paragraphs marked."""
    text = ""
    # all fields are Time x Batch: column `lane` is one lane's window
    for code, start, real in zip(batch.data[:, lane], batch.is_first[:, lane], batch.mask[:, lane], strict=True):
        text += "»" * int(start) + (chr(int(code)) if real else "")
    return text


def main() -> None:
    """Print the first batches of an epoch."""
    parser = argparse.ArgumentParser(description="Prints batches of text, lane by lane.")
    parser.add_argument("file", nargs="?", type=Path, help="a text file; without, Python's own documentation")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--time-steps", type=int, default=48)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    text = options.file.read_text() if options.file else python_documentation()
    dataset = StreamDataset(
        split_paragraphs(text),
        open_paragraph,
        batch_size=options.lanes,
        time_steps=options.time_steps,
        windows="packed",  # the next paragraph starts on the very next time step: nothing is padded but the end
    )
    loader = StreamDataLoader(dataset, num_workers=options.workers)
    for batch in islice(loader, options.batches):
        print(f"batch {batch.batch_index}")
        for lane in range(len(batch)):
            print(f"  lane {lane} (worker {int(batch.worker_id[lane])}): {lane_text(batch, lane)}")


if __name__ == "__main__":
    main()
