"""Run by torchrun: Accelerate with several processes, saving or going on; writes down what each rank read."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from stream_dataloader import StreamDataLoader, StreamDataset, merge_states

if __name__ == "__main__":
    out, path, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
    accelerator = Accelerator(cpu=True)
    lengths = [9, 14, 3, 12, 8, 7, 11, 5, 2, 6]
    dataset = StreamDataset(lengths, range, 2, time_steps=3, shuffle=True, seed=0)
    given = StreamDataLoader(dataset, 1, timeout=60)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), given)
    assert loader is given
    if not stop:
        loader.load_state_dict(torch.load(path))
    seen = []
    for batch in loader:
        model(batch.data.float()[..., None]).mean().backward()
        seen.append((batch.epoch, batch.step, batch.source.tolist(), batch.position.tolist(), batch.mask.tolist()))
        if len(seen) == stop:
            state = merge_states(gather_object([loader.state_dict()]))
            if accelerator.is_main_process:
                torch.save(state, path)
            break
    with open(f"{out}.{accelerator.process_index}", "w") as file:
        json.dump(seen, file)
    accelerator.end_training()
