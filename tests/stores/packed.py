"""Small streams to keep in stores, and stores of them."""

import os

import numpy as np

from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.memmap.writer import MemmapPacker


def images(lengths, seed=0, size=(3, 4, 5)):
    rng = np.random.default_rng(seed)
    return [
        [
            {
                "image": rng.integers(0, 256, size, np.uint8),
                "label": np.int64(1000 * number + step),
                "pose": (rng.standard_normal(6).astype(np.float32), np.bool_(step % 2)),
            }
            for step in range(length)
        ]
        for number, length in enumerate(lengths)
    ]


def pack_here(packer, streams, workers=1):
    parts = [packer.part(worker) for worker in range(workers)]
    records = []
    for number, items in enumerate(streams):
        steps, place = parts[number % workers].write(number, f"stream/{number}", iter(items))
        records.append(StreamRecord(number, f"stream/{number}", steps, place, {"n": number}))
    finish_here(packer, records, [said for part in parts for said in (part.sync(), part.close())])


#: Streams of which one is empty.
STREAMS = images((5, 0, 9, 3))


def memory_mapped(folder):
    """Pack `STREAMS` into a memory-mapped store; return its path."""
    pack_here(MemmapPacker(str(folder)), STREAMS)
    return str(folder)


def finish_here(packer, records, synced=()):
    files = packer.finish(records, synced)
    for name in {*os.listdir(packer._folder)} - {*files}:
        os.unlink(os.path.join(packer._folder, name))
