"""Trainers that ask a loader for attributes of torch's: the real packages."""

import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def loader(workers=0):
    return StreamDataLoader(StreamDataset([6, 4, 5], lambda n: map(float, range(n)), 2, time_steps=2), workers)


def test_lightning_overfits_on_the_first_batches_and_seeds_workers(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning.pytorch")
    seen = []

    class Model(lightning.LightningModule):
        def training_step(self, batch, index):
            seen.append((batch.epoch, batch.step))
            return self.layer(batch.data.float().unsqueeze(-1)).mean()

        def configure_model(self):
            self.layer = torch.nn.Linear(1, 1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-6)

    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # as seed_everything(workers=True) does
    ours = loader(2)
    trainer = lightning.Trainer(
        max_epochs=2,
        overfit_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Model(), ours)
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ours.worker_init_fn.func.__name__ == "pl_worker_init_function"


def test_accelerate_refuses_to_take_the_loader_apart():
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(AttributeError, match=r"no drop_last: .*load_state_dict\(\), or use itertools.islice"):
        accelerate.skip_first_batches(loader(), 1)
    with pytest.raises(AttributeError, match="no sampler: it reads streams"):
        accelerate.Accelerator(cpu=True).prepare_data_loader(loader())


def test_transformers_finds_no_sampler():
    utilities = pytest.importorskip("transformers.trainer_pt_utils")
    assert utilities.get_dataloader_sampler(loader()) is None
