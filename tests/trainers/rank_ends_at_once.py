"""Run as one of two ranks: leaves an epoch, and ends while its threads still speak to the store of torch.distributed.

Python is taken down under them then, which a call into torch that returns would not survive.
"""

import sys

import numpy as np
import torch.distributed as dist

from stream_dataloader import StreamDataLoader, StreamDataset

LENGTHS = [3] * 8


def open_stream(length):
    return iter([np.zeros(1, np.float32)] * length)


if __name__ == "__main__":
    port, prefix, rank = sys.argv[1:]
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=int(rank), world_size=2)
    loader = StreamDataLoader(StreamDataset(LENGTHS, open_stream, 2, time_steps=2, lengths=LENGTHS, seed=0))
    for _ in range(6):
        assert len(list(loader)) == len(loader)
    iterator = iter(loader)
    next(iterator)
