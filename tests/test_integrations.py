"""Trainers of other projects resume with the loader's state: Lightning and Accelerate, the real packages."""

import numpy as np
import pytest
import torch
from cases import key

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

LENGTHS = [9, 14, 3, 12, 8, 7, 11, 5]


def open_stream(length):
    source = get_stream_info().source_index
    return iter([np.full(3, 100 * source + i, np.float32) for i in range(length)])


def loader(workers=2, **options):
    return StreamDataLoader(
        StreamDataset(LENGTHS, open_stream, 2, time_steps=3, shuffle=True, seed=0, **options), workers
    )


def test_lightning_goes_on_at_the_next_batch(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from stream_dataloader.integrations.lightning import ExactResume

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(3, 1), []

        def training_step(self, batch, index):
            self.seen.append(key(batch))
            return self.layer(batch.data).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-6)

        def on_train_batch_end(self, outputs, batch, index):
            if len(self.seen) == self.stop:
                self.trainer.save_checkpoint(self.path)
                raise KeyboardInterrupt  # the run is cut off

    def fit(stop=None, checkpoint=None, path=None, **options):
        model = Model()
        model.stop, model.path = stop, path
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ExactResume()],
            default_root_dir=tmp_path,
        )
        try:
            trainer.fit(model, loader(**options), ckpt_path=checkpoint)
        except (KeyboardInterrupt, SystemExit):
            assert stop
        return model.seen

    for options in ({}, {"lengths": LENGTHS}):
        whole = fit(**options)
        batches = len(list(loader(**options)))
        assert len(whole) > batches > 8
        for stop in (1, 5, batches + 2):
            path = tmp_path / f"{stop}.ckpt"
            head = fit(stop, path=path, **options)
            assert head == whole[:stop]
            assert head + fit(checkpoint=path, **options) == whole, (stop, options)


def test_accelerate_leaves_the_loader_whole_and_resumes_it(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = [key(batch) for batch in loader()]
    accelerator = accelerate.Accelerator(cpu=True)
    first = accelerator.prepare(loader())
    assert type(first) is StreamDataLoader
    accelerator.register_for_checkpointing(first)
    head = []
    for batch in first:
        head.append(key(batch))
        if len(head) == 4:
            accelerator.save_state(str(tmp_path / "state"))
            break
    other = accelerate.Accelerator(cpu=True)
    second = other.prepare(loader(workers=0))
    other.register_for_checkpointing(second)
    other.load_state(str(tmp_path / "state"))
    assert head + [key(batch) for batch in second] == expected


def test_it_is_the_protocol_of_torchdatas_stateful_loader():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.stateful")
    assert isinstance(loader(), torchdata.Stateful)
