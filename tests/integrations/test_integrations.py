"""Trainers of other projects take the loader as it is: Lightning, Accelerate, transformers, Ray, torchdata."""

import re

import pytest
import torch
from helpers import ROOT, run_program

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings are theirs


def loader(workers=0):
    return StreamDataLoader(StreamDataset([6, 4, 5], lambda n: map(float, range(n)), 2, time_steps=2), workers)


def test_the_loader_is_not_taken_apart():
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(AttributeError, match="drop_last"):
        accelerate.skip_first_batches(loader(), 1)
    with pytest.raises(AttributeError, match="sampler"):
        accelerate.Accelerator(cpu=True).prepare_data_loader(loader())
    assert pytest.importorskip("transformers.trainer_pt_utils").get_dataloader_sampler(loader()) is None


def build():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator._custom_objects.clear()  # they outlive an Accelerator of the same process
    dataset = StreamDataset([9, 7, 5, 4], range, 2, time_steps=2, seed=0)
    loader, carry = accelerator.prepare(StreamDataLoader(dataset)), RecurrentState(batch_dim=1)
    assert type(loader) is StreamDataLoader
    accelerator.register_for_checkpointing(loader, carry)
    return accelerator, loader, carry


@pytest.mark.slow
def test_accelerate_saves_and_loads_a_carried_state(tmp_path):
    torch.manual_seed(0)
    gru = torch.nn.GRU(1, 3)

    def step(batch, carry):
        output, state = gru(batch.data[..., None].float(), carry.before(batch))
        carry.after(batch, state)
        return output.detach()

    accelerator, loader, carry = build()
    whole = []
    for batch in loader:
        whole.append(step(batch, carry))
        if batch.step == 2:
            accelerator.save_state(tmp_path)
    accelerator, loader, carry = build()
    accelerator.load_state(tmp_path)
    rest = [step(batch, carry) for batch in loader]
    assert len(rest) == 4
    assert all(map(torch.equal, rest, whole[3:]))


@pytest.mark.slow
def test_ray_train_goes_on_after_a_failure():
    pytest.importorskip("ray.train")
    output = run_program(ROOT / "examples" / "ray_train.py")
    lines = re.findall(r"epoch (\d), rank (\d): (\d+) batches, (\d+) items", output)
    assert sorted((epoch, rank) for epoch, rank, _, _ in lines) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({batches for _, _, batches, _ in lines}) == 1
    items = sum((7 * i) % 30 + 3 for i in range(40))
    assert [sum(int(n) for epoch, _, _, n in lines if epoch == e) for e in "01"] == [items] * 2
    assert set(re.findall(r"rank (\d) goes on with epoch 1", output)) == {"0", "1"}


def test_it_is_the_protocol_of_torchdatas_stateful_loader():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.stateful")
    assert isinstance(loader(), torchdata.Stateful)
