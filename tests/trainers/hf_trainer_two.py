"""Run by torchrun: the Trainer of transformers, saving in mid-epoch or going on; writes down what each rank read."""

import json
import sys
import warnings

import torch
from carried import Carriers
from transformers import TrainerCallback, TrainingArguments

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.integrations.transformers import StreamTrainer

LENGTHS = [9, 14, 3, 12, 8, 7, 11, 5, 2, 6]


def open_stream(length):
    source = get_stream_info().source_index
    return iter([{"x": torch.tensor([100.0 * source + i])} for i in range(length)])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": self.layer(x / 1000).square().mean()}


class Trains(StreamTrainer):
    def compute_loss(self, model, inputs, *args, **options):
        batch = inputs["batch"]
        counts = CARRIERS.count(batch, batch.data["x"])
        seen.append([batch.data["x"][batch.mask].flatten().tolist(), batch.batch_index, counts])
        return super().compute_loss(model, {"x": batch.data["x"]}, *args, **options)


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == STOP:
            control.should_save = control.should_training_stop = True


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    OUT, FOLDER, STOP = sys.argv[1], sys.argv[2], int(sys.argv[3])
    args = TrainingArguments(
        FOLDER, num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    lanes = 4 // args.world_size
    dataset = StreamDataset(LENGTHS, open_stream, lanes, time_steps=3, shuffle=True, seed=0, lengths=LENGTHS)
    CARRIERS, seen = Carriers(), []
    trainer = Trains(
        Model(),
        args,
        train_dataset=StreamDataLoader(dataset, 1, timeout=60, virtual_ranks=2),
        model_inputs=lambda batch: {"batch": batch},
        carry=CARRIERS.all,
        callbacks=[Stops()],
    )
    trainer.train(resume_from_checkpoint=not STOP)
    with open(f"{OUT}.{args.process_index}", "w") as file:
        json.dump(seen, file)
    trainer.accelerator.end_training()
