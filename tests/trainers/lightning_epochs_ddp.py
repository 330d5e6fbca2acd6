"""Run by torchrun: trains with Lightning's ddp, goes on from each checkpoint that was written, and compares.

Where Lightning does not call `iter` behind an epoch, ranks must still agree on its end.
"""

import logging
import pathlib
import sys
import warnings

import lightning.pytorch as lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.integrations.lightning import StreamEpochs
from stream_dataloader.recurrent import RecurrentState

LENGTHS = [9, 4, 3, 12, 2, 7, 1, 5, 2, 6]
KINDS = {
    "known": ({"lengths": LENGTHS, "shuffle": True}, {}),
    "unknown": ({"shuffle": True}, {}),
    "cycling": ({"padding_mode": "cycle", "shuffle": True}, {"batches_per_epoch": 7}),
}


def open_stream(length):
    source = get_stream_info().source_index
    return iter([np.full(1, 100 * source + i, np.float32) for i in range(length)])


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.validated = torch.nn.Linear(1, 1), [], 0
        self.carry = RecurrentState(batch_dim=0)

    def training_step(self, batch, index):
        state = self.carry.before(batch)
        state = batch.data.sum(0) + (0 if state is None else state)  # a sum along the stream
        self.carry.after(batch, state)
        self.seen.append((batch.epoch, batch.step, batch.source.tolist(), batch.position.tolist(), state.tolist()))
        return self.layer(batch.data).square().mean()

    def validation_step(self, batch, index):
        self.validated += index == 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(kind, folder, callbacks=(), checkpoint=None):
    of_dataset, of_loader = KINDS[kind]
    train = StreamDataLoader(StreamDataset(LENGTHS, open_stream, 2, time_steps=2, seed=0, **of_dataset), **of_loader)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[StreamEpochs(carry=model.carry), *callbacks],
        default_root_dir=folder,
    )
    trainer.fit(model, train, torch.utils.data.DataLoader(range(4)), ckpt_path=checkpoint)
    return model


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
        counts = [sum(epoch == e for epoch, *_ in whole.seen) for e in range(3)]
        assert kind == "cycling" or len(set(counts)) > 1, counts
        assert whole.validated == 3
        dist.barrier()
        for path in sorted(folder.glob(f"{kind}-*/*.ckpt")):
            steps = int(path.stem.split("=")[1])
            assert fit(kind, folder, checkpoint=path).seen == whole.seen[steps:], path
        sys.stdout.write(f"{kind} ok\n")
