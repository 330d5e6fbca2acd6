"""Run by torchrun: trains with Lightning's ddp, goes on from each checkpoint that was written, and compares.

Where Lightning does not call `iter` behind an epoch, ranks must still agree on its end.
"""

import logging
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.append(str(pathlib.Path(__file__).parents[1] / "integrations"))

import lightning_runs
from carried import counted

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.integrations.lightning import StreamEpochs
from stream_dataloader.recurrent import RecurrentState

LENGTHS = [9, 4, 3, 12, 2, 7, 1, 5, 2, 6]
KINDS = {
    "known": ({"lengths": LENGTHS, "shuffle": True}, {}),
    "unknown": ({"shuffle": True}, {}),
    "cycling": ({"padding_mode": "cycle", "shuffle": True}, {"batches_per_epoch": 7}),
}


class Model(lightning_runs.Model):
    def __init__(self):
        super().__init__()
        self.carry = RecurrentState(batch_dim=0)

    def training_step(self, batch, index):
        state = counted(batch, self.carry.before(batch))
        self.carry.after(batch, state)
        loss = super().training_step(batch, index)
        self.trained[-1] += (batch.position.tolist(), state.tolist())
        return loss


def fit(kind, folder, callbacks=(), checkpoint=None):
    of_dataset, of_loader = KINDS[kind]
    dataset = StreamDataset(LENGTHS, lightning_runs.open_stream, 2, time_steps=2, seed=0, **of_dataset)
    model, validation = Model(), torch.utils.data.DataLoader(range(4))
    callbacks = [StreamEpochs(carry=model.carry), *callbacks]
    options = {"model": model, "validation": validation, "checkpoint": checkpoint, "devices": 2, "strategy": "ddp"}
    return lightning_runs.fit(StreamDataLoader(dataset, **of_loader), folder, callbacks, **options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder = pathlib.Path(sys.argv[1])
    for kind in KINDS:
        callbacks = [
            ModelCheckpoint(folder / f"{kind}-step", "{step}", every_n_train_steps=4, save_top_k=-1),
            ModelCheckpoint(folder / f"{kind}-end", "{step}", every_n_epochs=1, save_top_k=-1),
        ]
        whole = fit(kind, folder, callbacks)
        counts = [sum(epoch == e for epoch, *_ in whole.trained) for e in range(3)]
        assert kind == "cycling" or len(set(counts)) > 1, counts
        assert whole.events.count("validated") == 3
        dist.barrier()
        for path in sorted(folder.glob(f"{kind}-*/*.ckpt")):
            steps = int(path.stem.split("=")[1])
            assert fit(kind, folder, checkpoint=path).trained == whole.trained[steps:], path
        sys.stdout.write(f"{kind} ok\n")
