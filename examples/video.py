"""A loader for folders of videos: subclass `StreamDataLoader`, and say how to open one video.

    python examples/video.py [FOLDER] [--workers 2]

Without a folder it reads a dozen short clips, which it makes once.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from numpy.typing import NDArray

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.cli.demo import default_clips


def open_video(path: str, width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    """One stream: yields the frames of a video, `(3, height, width)` uint8 RGB."""
    cv2.setNumThreads(1)  # each worker keeps one core busy; more threads would only get in each other's way
    with av.open(path) as container:  # closed when the stream ends, and also when an epoch is left early
        video = container.streams.video[0]
        video.thread_type, video.codec_context.thread_count = "NONE", 1
        for frame in container.decode(video):
            image = cv2.resize(frame.to_ndarray(format="rgb24"), (width, height), interpolation=cv2.INTER_AREA)
            yield np.ascontiguousarray(image.transpose(2, 0, 1), np.uint8)


class VideoLoader(StreamDataLoader):
    """Batches of frames `(T, B, 3, height, width)`, each lane one video after another.

    Args:
        paths: The videos.
        options: Passed on to `StreamDataLoader`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        batch_size: int = 4,
        time_steps: int = 8,
        width: int = 160,
        height: int = 120,
        num_workers: int = 2,
        **options: Any,
    ) -> None:
        dataset = StreamDataset(
            [str(path) for path in paths],
            partial(open_video, width=width, height=height),  # a lambda would do; a partial says what it is
            batch_size,
            time_steps=time_steps,
            shuffle=True,
            seed=0,
            on_error="skip",  # a broken video costs that video, not the epoch
        )
        super().__init__(dataset, num_workers, **options)


def main() -> None:
    """Read one epoch."""
    parser = argparse.ArgumentParser(description="Streams videos and prints what the batches hold.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of videos; without, clips made for the demo")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    paths = sorted(options.folder.rglob("*.mp4")) if options.folder else default_clips()
    loader = VideoLoader(paths, num_workers=options.workers)
    frames = 0
    for batch in loader:
        frames += int(batch.mask.sum())  # padding is no frame
        shape = tuple(batch.data.shape)
        print(f"batch {batch.batch_index}: {shape} {batch.data.dtype}, reset {batch.reset.int().tolist()}", end="")
        # where a lane starts a video, at t = 0: the moment to zero its hidden state
        started = [Path(loader.dataset.sources[source]).name for source in batch.source_index[0, batch.reset].tolist()]
        print(f" {' '.join(started)}".rstrip())
    print(f"{frames} frames of {len(paths)} videos, {len(loader.failures)} of them skipped")


if __name__ == "__main__":
    main()
