"""Run by torchrun, or by itself: a prepared loader, saved in mid-epoch or gone on with; what each rank read and did.

The last argument is "model", "no model", or "itself" where accelerate prepares the loader, which leaves it as it is.
"""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from carried import Carriers

from stream_dataloader import StreamDataLoader, StreamDataset, merge_states
from stream_dataloader.integrations.accelerate import prepare

LENGTHS = [9, 14, 3, 12, 8, 7, 11, 5, 2, 6]

if __name__ == "__main__":
    out, folder, stop, with_model = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "model"
    itself = sys.argv[4] == "itself"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    lanes = 4 // accelerator.num_processes
    dataset = StreamDataset(LENGTHS, range, lanes, time_steps=3, shuffle=True, seed=0)
    carriers = Carriers()
    given = StreamDataLoader(dataset, 1, timeout=60, virtual_ranks=2)
    loader = accelerator.prepare(given) if itself else prepare(accelerator, given, carry=carriers.all)
    assert (loader is given) == itself
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    if with_model:
        model, optimizer = accelerator.prepare(model, optimizer)
    if itself and not stop:
        loader.load_state_dict(torch.load(folder, weights_only=True))
        [carry.reset() for carry in carriers.all]
    elif not stop:
        accelerator.load_state(folder)
    seen, steps, states, refused = [], 0, [], False
    for batch in (batch for _ in range(0 if itself else loader.epoch, 2) for batch in loader):
        with accelerator.accumulate(model) if with_model else accelerator.accumulate():
            accelerator.backward(model(batch.data.float()[..., None]).mean())
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        states.append(carriers.count(batch, batch.data))
        seen.append(
            (batch.epoch, batch.batch_index, batch.source_index.tolist(), batch.position.tolist(), batch.mask.tolist())
        )
        if len(seen) == stop and itself:
            state = merge_states(gather_object([loader.state_dict()]))
            if accelerator.is_main_process:
                torch.save(state, folder)
            break
        if len(seen) == stop:
            accelerator.register_for_checkpointing(carriers.memory)
            try:
                accelerator.save_state(folder + "_of_one")
            except ValueError as error:
                refused = "carry=" in str(error)
            accelerator._custom_objects.pop()
            accelerator.save_state(folder)
            break
    with open(f"{out}.{accelerator.process_index}", "w") as file:
        json.dump([seen, steps, [parameter.tolist() for parameter in model.parameters()], states, refused], file)
    accelerator.end_training()
