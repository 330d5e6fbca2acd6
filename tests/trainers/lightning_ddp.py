"""Run by torchrun: trains with Lightning's ddp, saves in mid-epoch or goes on, and writes down what each rank read."""

import json
import sys
import warnings

import lightning.pytorch as lightning
import numpy as np
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.integrations.lightning import ExactResume

LENGTHS = [9, 14, 3, 12, 8, 7, 11, 5, 2, 6]


def open_stream(length):
    source = get_stream_info().source_index
    return iter([np.full(3, 100 * source + i, np.float32) for i in range(length)])


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(3, 1), []

    def training_step(self, batch, index):
        assert isinstance(self.trainer.train_dataloader, StreamDataLoader)
        self.seen.append((batch.epoch, batch.step, batch.source.tolist(), batch.position.tolist(), batch.mask.tolist()))
        return self.layer(batch.data).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

    def on_train_batch_end(self, outputs, batch, index):
        if len(self.seen) == STOP:
            self.trainer.save_checkpoint(PATH)
            self.trainer.should_stop = True
            raise KeyboardInterrupt  # the run is cut off


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    OUT, PATH, STOP, KNOWN = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "known"
    known = {"lengths": LENGTHS} if KNOWN else {}
    dataset = StreamDataset(LENGTHS, open_stream, 2, time_steps=3, shuffle=True, seed=0, **known)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ExactResume()],
    )
    try:
        trainer.fit(model, StreamDataLoader(dataset, 1, timeout=60), ckpt_path=None if STOP else PATH)
    except (KeyboardInterrupt, SystemExit):
        assert STOP
    with open(f"{OUT}.{trainer.global_rank}", "w") as file:
        json.dump(model.seen, file)
