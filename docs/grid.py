"""Draws the picture at the top of the README: five batches of the demo's clips, a row a lane.

    python docs/grid.py [PATH]

Writes `docs/assets/grid.png` by default. Few shades of each colour keep the file small.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.cli.demo import default_clips
from stream_dataloader.cli.film import Filmstrip
from stream_dataloader.streams import VideoStream


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draws the README's picture.")
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path(__file__).parent / "assets" / "grid.png"
    )
    path = parser.parse_args().path
    clips = default_clips()
    dataset = StreamDataset(clips, VideoStream(size=(126, 168)), batch_size=4, time_steps=8, seed=0)
    strip = Filmstrip(lambda source: clips[source].name, batches=5)
    for batch in StreamDataLoader(dataset, num_workers=2):
        strip.add(batch)
    strip.save(path)
    picture = cv2.imread(str(path))
    options = [
        cv2.IMWRITE_PNG_COMPRESSION,
        9,
        cv2.IMWRITE_PNG_STRATEGY,
        cv2.IMWRITE_PNG_STRATEGY_DEFAULT,
    ]
    cv2.imwrite(str(path), (picture & 0xF8) | 0x04, options)


if __name__ == "__main__":
    main()
