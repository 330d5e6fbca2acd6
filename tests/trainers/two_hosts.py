"""One of two ranks on hosts of their own: reads slowly, saves every fifth step, writes down what it read."""

import json
import os
import sys
import time

import torch.distributed as dist

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import RankError

if __name__ == "__main__":
    rank, folder, wait, resume = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"tcp://{os.environ['MASTER']}:29533", rank=rank, world_size=2)
    lengths = [60, 40]
    loader = StreamDataLoader(StreamDataset(lengths, range, 1, seed=0, time_steps=1), 1, timeout=4)
    if resume:
        with open(f"{folder}/state.{rank}.{resume}") as file:
            loader.load_state_dict(json.load(file))
    seen, ending, begin = [], "ended", time.monotonic()
    try:
        for batch in loader:
            seen.append((batch.batch_index, batch.data.tolist(), batch.mask.tolist()))
            begin = time.monotonic()
            if batch.batch_index % 5 == 4:
                with open(f"{folder}/state.{rank}.{batch.batch_index + 1}", "w") as file:
                    json.dump(batch.state_dict(), file)
            time.sleep(wait)
    except RankError as error:
        ending = f"{error} [{time.monotonic() - begin - wait:.1f} s]"
    if ending == "ended":
        dist.barrier()  # the store ends with the process that keeps it
    with open(f"{folder}/seen.{rank}", "w") as file:
        json.dump({"seen": seen, "ending": ending}, file)
    os._exit(0)  # the process group cannot say goodbye over a network that is cut
