"""Trainers of other projects resume with the loader's state: Lightning and Accelerate, the real packages."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import key
from helpers import PATIENCE, ROOT

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are theirs

TRAINERS = ROOT / "tests" / "trainers"
EXAMPLES = ROOT / "examples"
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


def on_two_ranks(script, folder, *arguments):
    """What each rank read, batch after batch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*command, TRAINERS / script, folder / "seen", *map(str, arguments)],
        check=True,
        timeout=PATIENCE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
    )
    return [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]


def items_of(epoch, ranks):
    """The items that all ranks together read in an epoch for the first time."""
    return sorted(
        (s, p)
        for seen in ranks
        for number, _, *table in seen
        if number == epoch
        for rows in zip(*table, strict=True)
        for s, p, m in zip(*rows, strict=True)
        if m
    )


ALL = [(i, j) for i, length in enumerate([9, 14, 3, 12, 8, 7, 11, 5, 2, 6]) for j in range(length)]


@pytest.mark.parametrize("known", ["known", "unknown"])
def test_lightning_ddp_reads_all_on_equal_steps_and_goes_on(tmp_path, known):
    pytest.importorskip("lightning.pytorch")
    path = tmp_path / "state.ckpt"
    whole = on_two_ranks("lightning_ddp.py", tmp_path, path, 10**6, known)
    assert len(whole[0]) == len(whole[1]) > 10
    assert items_of(0, whole) == items_of(1, whole) == ALL
    head = on_two_ranks("lightning_ddp.py", tmp_path, path, 5, known)
    tail = on_two_ranks("lightning_ddp.py", tmp_path, path, 0, known)
    assert [mine + rest for mine, rest in zip(head, tail, strict=True)] == whole


def test_accelerate_with_two_processes_shards_nothing_again(tmp_path):
    pytest.importorskip("accelerate")
    path = tmp_path / "state.pt"
    whole = on_two_ranks("accelerate_two.py", tmp_path, path, 10**6)
    assert len(whole[0]) == len(whole[1]) > 5
    assert items_of(0, whole) == ALL
    head = on_two_ranks("accelerate_two.py", tmp_path, path, 4)
    tail = on_two_ranks("accelerate_two.py", tmp_path, path, 0)
    assert [mine + rest for mine, rest in zip(head, tail, strict=True)] == whole


def test_ray_train_goes_on_after_a_failure():
    pytest.importorskip("ray.train")
    result = subprocess.run(
        [sys.executable, EXAMPLES / "ray_train.py"], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    lines = re.findall(r"epoch (\d), rank (\d): (\d+) batches, (\d+) items", result.stdout)
    assert sorted((epoch, rank) for epoch, rank, _, _ in lines) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({batches for _, _, batches, _ in lines}) == 1
    items = sum((7 * i) % 30 + 3 for i in range(40))
    assert [sum(int(n) for epoch, _, _, n in lines if epoch == e) for e in "01"] == [items] * 2
    assert set(re.findall(r"rank (\d) goes on with epoch 1", result.stdout)) == {"0", "1"}


def test_it_is_the_protocol_of_torchdatas_stateful_loader():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.stateful")
    assert isinstance(loader(), torchdata.Stateful)
