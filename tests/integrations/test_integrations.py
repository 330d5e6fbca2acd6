"""Other projects take the loader and the sampler as they are; pages and examples on trainers print what they say."""

import importlib.util
import re

import pytest
from helpers import ROOT, run_program

from stream_dataloader import LaneBatchSampler, StreamDataLoader, StreamDataset

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


CYCLES = {"padding_mode": "cycle", "batches_per_epoch": 12}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"padding_mode": "zeros"}, CYCLES], ids=["zeros", "cycle"])
def test_torchdatas_loader_goes_on_with_the_samplers_batch_it_stopped_at(workers, options):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build():
        sampler = LaneBatchSampler(2, 2, lengths=[13, 9, 11, 7], shuffle=True, seed=0, **options)
        return stateful.StatefulDataLoader(range(40), batch_sampler=sampler, num_workers=workers)

    def read(loader):
        return [batch.tolist() for batch in loader]

    whole = build()
    first, second = read(whole), read(whole)
    for steps in (1, 5, len(first)):
        loader, resumed = build(), build()
        batches = iter(loader)
        used = [next(batches).tolist() for _ in range(steps)]
        resumed.load_state_dict(loader.state_dict())
        del batches
        if steps < len(first):  # else the epoch is over with its last batch
            assert used + read(resumed) == first
        assert read(resumed) == second


def needs(*packages):
    return pytest.mark.skipif(not all(map(importlib.util.find_spec, packages)), reason=f"needs {packages}")


@pytest.mark.slow
@needs("mmengine")
def test_the_guides_recipe_for_mmengine_goes_on_at_the_next_batch(tmp_path):
    # mmengine's checkpoints hold classes of its own, which torch has not loaded since 2.6
    environment = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    output = run_program(ROOT / "tests" / "trainers" / "mmengine_lanes.py", tmp_path, folder=tmp_path, **environment)
    assert len(re.findall(" ok$", output, re.MULTILINE)) == 4


PAGE = (ROOT / "docs" / "guides" / "trainers.md").read_text()
PROGRAMS = re.findall(r"^```py\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```$", PAGE, re.MULTILINE)
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SHORT = ["--epochs", "1", "--workers", "0"]
#: A program, its arguments, on how many ranks it runs, and how many of them tell of losses.
EXAMPLES = {
    "accelerate": ("accelerate_loop.py", SHORT, 1, 1),
    "lightning": ("lightning_module.py", SHORT, 1, 1),
    "trainer": ("hf_trainer.py", ["--stop-after", "9"], 1, 1),
    "accelerate-2": ("accelerate_loop.py", [*SHORT, "--stop-after", "4"], 2, 2),
    "lightning-2": ("lightning_module.py", [*SHORT, "--ranks", "2"], 1, 2),
}


@pytest.mark.slow
@needs("accelerate", "transformers")
@pytest.mark.parametrize(("code", "output"), PROGRAMS, ids=["accelerate", "trainer"])
def test_a_block_of_the_page_on_trainers_prints_what_follows_it(code, output, tmp_path):
    (tmp_path / "program.py").write_text(code)
    assert run_program(tmp_path / "program.py", folder=tmp_path, **WITHOUT_GPU) == output


@pytest.mark.slow
@needs("accelerate", "transformers")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_goes_on_with_the_same_losses(name, tmp_path):
    program, arguments, ranks, told = EXAMPLES[name]
    output = run_program(ROOT / "examples" / program, *arguments, ranks=ranks, folder=tmp_path, **WITHOUT_GPU)
    assert output.count("the same losses: True\n") == told
    for first, last in re.findall(r"loss ([\d.]+) to ([\d.]+)", output):
        assert float(last) < float(first)


@pytest.mark.slow
def test_the_shared_model_shows_batches():
    output = run_program(ROOT / "examples" / "byte_model.py", **WITHOUT_GPU)
    assert len(re.findall(r"^batch \d: loss 5\.\d+, lane 0 reads '", output, re.MULTILINE)) == 3
