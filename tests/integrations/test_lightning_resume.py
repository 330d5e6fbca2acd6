"""A run of Lightning that goes on from any checkpoint trains on what a run without a break does: the real package."""

import itertools
import logging
import os
import subprocess
import sys

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")

from helpers import FULL, PATIENCE, ROOT  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning_runs import COUNTS, LENGTHS, Break, Model, beside, cycling, fit, key, loader, trainer_of  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from stream_dataloader import StateError, StreamDataLoader, StreamDataset  # noqa: E402
from stream_dataloader.integrations.lightning import StreamEpochs  # noqa: E402
from stream_dataloader.recurrent import RecurrentState  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

ALL = sum(COUNTS)
VALIDATION = DataLoader(range(2))
LOADERS = {"known": lambda: loader(known=True), "unknown": lambda: loader(known=False), "cycling": cycling}
kinds_of_loader = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


def whole_run(make, folder, **options):
    return fit(make(), folder, [StreamEpochs()], **options)


def resumed(make, folder, path, **options):
    return fit(make(), folder, [StreamEpochs()], checkpoint=path, **options)


def paths_in(folder):
    """Checkpoints in the order in which they were written."""
    return sorted(folder.glob("*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def check_each(make, folder, checkpoint, expected, **options):
    """Resume from each checkpoint that a run writes; the batches trained on before it are `expected`."""
    model = fit(make(), folder, [StreamEpochs(), checkpoint], **options)
    paths = paths_in(folder / "saved")
    assert len(paths) == len(expected)
    for path, before in zip(paths, expected, strict=True):
        tail = resumed(make, folder, path, **options)
        assert tail.trained == model.trained[before:], path
        assert tail.events == model.events[len(model.events) - len(tail.events) :], path


KINDS_ON_RANKS = 3


def counts_of(make):
    """How many batches each epoch has."""
    return [6, 6, 6] if make is cycling else COUNTS


def ends_of(make):
    return [sum(counts_of(make)[: e + 1]) for e in range(3)]


def within_epochs(make):
    begins = zip([0, *ends_of(make)], counts_of(make), strict=False)
    return [begin + n for begin, count in begins for n in range(2, count + 1, 2)]


#: When a checkpoint is written; after how many batches that is; options of the run.
WRITTEN = {
    "each step": ({"every_n_train_steps": 1}, lambda make: range(1, ALL + 1), {}),
    "each step, validated": ({"every_n_train_steps": 1}, lambda make: range(1, ALL + 1), {"validation": VALIDATION}),
    "an epoch's end": ({}, ends_of, {}),
    "an epoch's end, validated": ({}, ends_of, {"validation": VALIDATION}),
    "a validation": ({"save_on_train_epoch_end": False}, ends_of, {"validation": VALIDATION}),
    "within epochs": ({}, within_epochs, {"validation": VALIDATION, "val_check_interval": 2}),
}


@pytest.mark.parametrize(
    ("make", "written"),
    [
        *itertools.product(LOADERS.values(), WRITTEN),
        *itertools.product([beside, lambda: beside(known=False)], ["each step, validated"]),
    ],
)
def test_from_each_checkpoint_that_is_written(tmp_path, make, written):
    when, expected, options = WRITTEN[written]
    checkpoint = ModelCheckpoint(tmp_path / "saved", "{step}", save_top_k=-1, **when)
    check_each(make, tmp_path, checkpoint, expected(make), **options)


@kinds_of_loader
def test_from_the_last_one_after_max_steps(tmp_path, make):
    whole = whole_run(make, tmp_path, max_epochs=-1, max_steps=13, validation=VALIDATION)
    for steps in (3, COUNTS[0], 8):
        folder = tmp_path / str(steps)
        last = ModelCheckpoint(folder, save_last=True)
        options = {"max_epochs": -1, "validation": VALIDATION}
        head = fit(make(), tmp_path, [StreamEpochs(), last], max_steps=steps, **options)
        tail = resumed(make, tmp_path, folder / "last.ckpt", max_steps=13, **options)
        assert head.trained + tail.trained == whole.trained
        assert tail.events.count("validated") + head.events.count("validated") == whole.events.count("validated")


def at(number):
    """Raises at the `number`-th call."""
    calls = []

    def hook(model):
        calls.append(1)
        if len(calls) == number:
            raise Break

    return hook


@kinds_of_loader
@pytest.mark.parametrize("hook", ["epoch_start", "step", "batch_end", "validation"])
def test_from_an_exception(tmp_path, make, hook):
    whole = whole_run(make, tmp_path, validation=VALIDATION)
    numbers = {"epoch_start": (1, 2, 3), "validation": (1, 2, 3, 6)}.get(hook, (1, 2, *ends_of(make), 7))
    for number in numbers:
        save = OnExceptionCheckpoint(tmp_path, f"{hook}{number}")
        head = fit(make(), tmp_path, [StreamEpochs(), save], hooks={hook: at(number)}, validation=VALIDATION)
        tail = resumed(make, tmp_path, save.ckpt_path, validation=VALIDATION)
        assert head.trained + tail.trained == whole.trained, number
        assert [e for e in tail.events if e == "end"] == ["end"] * (3 - head.events.count("end"))


class Carrying(Model):
    """Sums up each stream, and fails after a batch's sum was kept."""

    def __init__(self, fail=0):
        super().__init__()
        self.carry, self.sums, self.fail = RecurrentState(batch_dim=0), [], fail

    def training_step(self, batch, index):
        state = self.carry.before(batch)
        state = batch.data.sum(0) + (0 if state is None else state)
        self.carry.after(batch, state)
        if len(self.sums) + 1 == self.fail:
            raise Break
        self.sums.append(state.tolist())
        return super().training_step(batch, index)


@kinds_of_loader
@pytest.mark.parametrize("fail", [1, 3, 7])
def test_what_is_carried_is_as_of_the_last_batch_trained_on(tmp_path, make, fail):
    def run(model, *callbacks, **options):
        return fit(make(), tmp_path, [StreamEpochs(carry=[model.carry]), *callbacks], model=model, **options)

    whole = run(Carrying())
    save = OnExceptionCheckpoint(tmp_path, f"{fail}")
    head = run(Carrying(fail), save)
    tail = run(Carrying(), checkpoint=save.ckpt_path)
    assert len(head.sums) == fail - 1
    assert head.sums + tail.sums == whole.sums


@pytest.mark.parametrize("make", [LOADERS["known"], LOADERS["unknown"]])
def test_from_a_source_that_broke(tmp_path, make):
    whole = whole_run(make, tmp_path)
    train = make()
    plain, reads = train.dataset.open_stream, []

    def break_once(length):
        for item in plain(length):
            reads.append(1)
            if len(reads) == 25:
                raise Break
            yield item

    broken = StreamDataset(
        LENGTHS,
        break_once,
        2,
        time_steps=2,
        shuffle=True,
        seed=0,
        lengths=LENGTHS if train.dataset.lengths is not None else None,
    )
    save = OnExceptionCheckpoint(tmp_path)
    head = Model()
    with pytest.raises(Exception, match="Break"):
        trainer_of(tmp_path, [StreamEpochs(), save]).fit(head, StreamDataLoader(broken))
    tail = resumed(make, tmp_path, save.ckpt_path)
    assert 0 < len(head.trained) < ALL
    assert head.trained + tail.trained == whole.trained


class Saving(lightning.Callback):
    """Saves at the `number`-th call of a hook, whatever it is for, and breaks the run off."""

    def __init__(self, hook, number, path):
        self.number, self.path = number, path
        setattr(self, hook, self.act)

    def act(self, trainer, *arguments, **named):
        self.number -= 1
        if self.number == 0:
            trainer.save_checkpoint(self.path)
            raise Break


HOOKS = [
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"),
]
RUNS = {
    "validated": {"validation": VALIDATION},
    "within": {"validation": VALIDATION, "val_check_interval": 2},
    "steps": {"validation": VALIDATION, "max_steps": 13, "max_epochs": -1},
    "limited": {"limit_train_batches": 4},
}


def in_the_second_epoch(hook):
    if hook in ("on_train_start", "on_train_end"):
        return 1
    return COUNTS[0] + 2 if "train_batch" in hook or "zero" in hook else 1 + (hook[-5:] != "start")


OF_ALL = list(itertools.product(LOADERS, HOOKS, RUNS))


@pytest.mark.parametrize(
    ("kind", "hook", "run"),
    [p if p[::2] == ("known", "validated") else pytest.param(*p, marks=pytest.mark.slow) for p in OF_ALL],
)
def test_from_whatever_hook_it_was_saved_in(tmp_path, kind, hook, run):
    make, options = LOADERS[kind], RUNS[run]
    whole = whole_run(make, tmp_path, **options)
    for number in range(1, ALL + 1) if FULL else [in_the_second_epoch(hook)]:
        path = tmp_path / f"{number}.ckpt"
        head = fit(make(), tmp_path, [StreamEpochs(), Saving(hook, number, path)], **options)
        if not path.exists():
            break
        tail = resumed(make, tmp_path, path, **options)
        done = len(head.trained) - (hook == "on_before_zero_grad")  # the step was not done
        assert head.trained[:done] + tail.trained == whole.trained, number
        again = hook == "on_validation_batch_end"  # which begins anew
        validated = head.events.count("validated") + tail.events.count("validated")
        assert validated == whole.events.count("validated") + again
    assert path.exists() or number > 1 or hook.startswith("on_validation")


def check_tails(make, tmp_path, model=Model, every=1, **options):
    """Resume from checkpoints of a run, every so many steps: each goes on with what came then."""
    whole = fit(make(), tmp_path, [StreamEpochs()], model=model(), **options)
    save = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=every, save_top_k=-1)
    fit(make(), tmp_path, [StreamEpochs(), save], model=model(), **options)
    paths = paths_in(tmp_path / "saved")
    assert len(paths) == len(whole.trained) // every
    for before, path in enumerate(paths, 1):
        tail = fit(make(), tmp_path, [StreamEpochs()], model=model(), checkpoint=path, **options)
        assert tail.trained == whole.trained[every * before :], path


def first_leaf(windows):
    return torch.stack(windows, 1)


class Collated(Model):
    def training_step(self, batch, index):
        self.trained.append(batch.flatten().tolist())
        return self.layer(batch).mean()


@pytest.mark.parametrize("known", [True, False])
def test_a_loader_with_a_collate_fn(tmp_path, known):
    def make():
        plain = loader(known)
        return StreamDataLoader(plain.dataset, collate_fn=first_leaf)

    check_tails(make, tmp_path, Collated, every=3)


@pytest.mark.parametrize(
    ("mode", "known"),
    [
        ("max_size_cycle", (True, True)),
        ("min_size", (True, True)),
        ("min_size", (False, False)),
        ("min_size", (True, False)),
    ],
)
def test_several_loaders(tmp_path, mode, known):
    def make():
        return CombinedLoader({"a": loader(known[0]), "b": loader(known[1], seed=1)}, mode)

    check_tails(make, tmp_path)


@kinds_of_loader
def test_where_the_number_of_steps_was_asked_for_before_the_checkpoint_is_loaded(tmp_path, make):
    class Asking(Model):
        def configure_optimizers(self):
            self.asked = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    whole = whole_run(make, tmp_path)
    for save in (
        ModelCheckpoint(tmp_path / "step", every_n_train_steps=8, save_top_k=-1),
        ModelCheckpoint(tmp_path / "end", save_top_k=-1),
    ):
        fit(make(), tmp_path, [StreamEpochs(), save])
        for path in paths_in(tmp_path / save.dirpath):
            tail = fit(make(), tmp_path, [StreamEpochs()], model=Asking(), checkpoint=path)
            assert len(tail.trained) < ALL
            assert tail.trained == whole.trained[ALL - len(tail.trained) :]


@kinds_of_loader
def test_where_loaders_are_made_anew_each_epoch(tmp_path, make):
    class Making(Model):
        def train_dataloader(self):
            return make()

    check_tails(lambda: None, tmp_path, Making, reload_dataloaders_every_n_epochs=1)


def other_loader():
    return StreamDataLoader(StreamDataset([4, 4], loader().dataset.open_stream, 2, time_steps=2, seed=0))


def test_other_sources_are_an_error_within_an_epoch_and_a_warning_between_two(tmp_path):
    end = ModelCheckpoint(tmp_path / "end")
    step = ModelCheckpoint(tmp_path / "step", every_n_train_steps=2, save_top_k=-1)
    fit(loader(), tmp_path, [StreamEpochs(), end, step], max_epochs=1)
    with pytest.raises(StateError):
        resumed(other_loader, tmp_path, paths_in(tmp_path / "step")[0])
    with pytest.warns(UserWarning, match="read from its beginning, without the loader's state: .*shuffle"):
        tail = resumed(other_loader, tmp_path, paths_in(tmp_path / "end")[0], max_epochs=2)
    assert [(epoch, step) for epoch, step, _ in tail.trained] == [(1, 0), (1, 1)]


def test_a_seed_that_was_drawn_is_in_checkpoints_of_an_epochs_end(tmp_path):
    def make():
        return loader(seed=None)

    torch.manual_seed(0)
    save = ModelCheckpoint(tmp_path / "saved", save_top_k=-1)
    model = fit(make(), tmp_path, [StreamEpochs(), save])
    torch.manual_seed(1)
    tail = resumed(make, tmp_path, paths_in(tmp_path / "saved")[0]).trained
    assert tail[0][:2] == (1, 0)
    assert tail == model.trained[-len(tail) :]


@kinds_of_loader
def test_the_state_in_a_checkpoint_is_the_loaders_own(tmp_path, make):
    save = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4)
    whole = fit(make(), tmp_path, [StreamEpochs(), save], max_epochs=1)
    (path,) = paths_in(tmp_path / "saved")
    (state,) = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    plain = make()
    plain.load_state_dict(state)
    assert [key(batch) for batch in plain] == whole.trained[4:]


class Steps(lightning.loggers.logger.Logger):
    """The steps that a logger is told."""

    name, version = "steps", 0

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_hyperparams(self, *arguments, **named):
        pass

    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            self.steps.append(step)


class Logging(Model):
    def training_step(self, batch, index):
        self.log("loss", 1.0)
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    "options",
    [{}, {"validation": VALIDATION}, {"validation": VALIDATION, "max_steps": 13, "max_epochs": -1}],
    ids=["alone", "validated", "steps"],
)
def test_loggers_are_told_the_steps_of_a_run_without_a_break(tmp_path, options):
    def steps_of(callbacks, **more):
        logger = Steps()
        values = {"log_every_n_steps": 1, "logger": logger, "model": Logging()} | options | more
        fit(loader(), tmp_path, [StreamEpochs(), *callbacks], **values)
        return logger.steps

    step = ModelCheckpoint(tmp_path / "saved", "a{step}", every_n_train_steps=1, save_top_k=-1)
    end = ModelCheckpoint(tmp_path / "saved", "b{step}", every_n_epochs=1, save_top_k=-1)
    whole = steps_of([step, end])
    assert whole == list(range(len(whole)))
    for path in paths_in(tmp_path / "saved"):
        before = int(path.stem.split("=")[1])
        assert steps_of([], checkpoint=path) == whole[before:], path


def test_a_step_that_takes_the_iterator(tmp_path):
    class Taking(Model):
        def training_step(self, dataloader_iter):
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    check_tails(loader, tmp_path, Taking, every=2, validation=VALIDATION)


@pytest.mark.slow
def test_two_ranks_go_on_from_each_checkpoint(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ROOT / "tests" / "trainers" / "lightning_epochs_ddp.py"
    done = subprocess.run(
        [*command, script, tmp_path],
        check=False,
        timeout=PATIENCE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" ok") == 2 * KINDS_ON_RANKS
