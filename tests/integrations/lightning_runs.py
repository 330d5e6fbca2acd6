"""Runs of Lightning over small streams, which write down what was trained on and when was validated."""

import contextlib

import lightning.pytorch as lightning
import numpy as np
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info, side_by_side

#: Shuffled with seed 0, the first three epochs have so many batches.
LENGTHS, COUNTS = [3, 3, 9, 2], [6, 5, 7]


def open_stream(length):
    source = get_stream_info().source_index
    return iter([np.full(1, 100 * source + i, np.float32) for i in range(length)])


def loader(known=True, open_stream=open_stream, **options):
    lengths = {"lengths": LENGTHS} if known else {}
    values = {"shuffle": True, "seed": 0} | options
    return StreamDataLoader(StreamDataset(LENGTHS, open_stream, 2, time_steps=2, **lengths, **values))


def cycling(seed=0):
    """Epochs of 6 batches, which are stretches of one endless run."""
    dataset = StreamDataset(LENGTHS, open_stream, 2, "cycle", time_steps=2, shuffle=True, seed=seed)
    return StreamDataLoader(dataset, batches_per_epoch=6)


def beside(known=True):
    """Two lanes as those of `loader`, beside one of an endless run."""
    run = StreamDataset([5, 4, 1], open_stream, 1, "cycle", time_steps=2, shuffle=True, seed=3)
    return side_by_side([(loader(known).dataset, 2), (run, 1)])


class Break(Exception):
    """The run is cut off."""


class Model(lightning.LightningModule):
    """Notes `(epoch, step, sources)` of what it trains on, and `"validated"` between."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.events = [], []

    def training_step(self, batch, index):
        self.trained.append(key(batch))
        self.events.append((self.current_epoch, index))
        return self.layer(first(batch).data).square().mean()

    def on_train_epoch_end(self):
        self.events.append("end")

    def validation_step(self, batch, index):
        if index == 0:
            self.events.append("validated")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def first(batch):
    return next(each for each in batch.values() if each is not None) if isinstance(batch, dict) else batch


def key(batch):
    if isinstance(batch, dict):
        return {name: key(each) for name, each in batch.items()}
    if batch is None or isinstance(batch, (list, torch.Tensor)):
        return batch
    return batch.epoch, batch.batch_index, batch.source_index.tolist()


def trainer_of(folder, callbacks=(), **options):
    values = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(each, lightning.callbacks.Checkpoint) for each in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return lightning.Trainer(callbacks=list(callbacks), **(values | options))


def fit(train, folder, callbacks=(), *, validation=None, checkpoint=None, model=None, **options):
    model = Model() if model is None else model
    trainer = trainer_of(folder, callbacks, **options)
    with contextlib.suppress(Break):
        trainer.fit(model, train, validation, ckpt_path=checkpoint)
    return model
