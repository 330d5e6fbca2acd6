"""A run of Lightning that goes on from any checkpoint trains on what a run without a break does: the real package."""

import itertools
import logging
import re

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")

from carried import Carriers, check_carried  # noqa: E402
from helpers import FULL, ROOT, run_program  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning_runs import COUNTS, Break, Model, beside, cycling, fit, key, loader, open_stream, trainer_of  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from stream_dataloader import StateError, StreamDataLoader, StreamDataset  # noqa: E402
from stream_dataloader.errors import ReadError  # noqa: E402
from stream_dataloader.integrations.lightning import StreamEpochs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

ALL = sum(COUNTS)
VALIDATION = DataLoader(range(2))
LOADERS = {"known": lambda: loader(known=True), "unknown": lambda: loader(known=False), "cycling": cycling}
kinds_of_loader = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


def whole_run(make, folder, **options):
    return fit(make(), folder, [StreamEpochs()], **options)


def resumed(make, folder, path, **options):
    return whole_run(make, folder, checkpoint=path, **options)


def saving(folder, **when):
    return ModelCheckpoint(folder / "saved", "{step}", save_top_k=-1, **when)


def saved_in(folder):
    """How many batches were trained on before each checkpoint, and its path."""
    paths = (folder / "saved").glob("*.ckpt")
    return sorted((int(re.search(r"step=(\d+)", path.name)[1]), path) for path in paths)


def check_each(make, folder, *, when, model=Model, **options):
    """Resume from each checkpoint that a run saves; how many there are."""
    whole = fit(make(), folder, [StreamEpochs(), saving(folder, **when)], model=model(), **options)
    for before, path in saved_in(folder):
        tail = resumed(make, folder, path, model=model(), **options)
        assert tail.trained == whole.trained[before:], path
        assert tail.events == whole.events[len(whole.events) - len(tail.events) :], path
    return len(saved_in(folder))


EACH = {"every_n_train_steps": 1}
#: When checkpoints are saved, how many at least, and options of the run.
WRITTEN = {
    "each step": (EACH, ALL, {}),
    "each step, validated": (EACH, ALL, {"validation": VALIDATION}),
    "an epoch's end": ({}, 3, {}),
    "an epoch's end, validated": ({}, 3, {"validation": VALIDATION}),
    "a validation": ({"save_on_train_epoch_end": False}, 3, {"validation": VALIDATION}),
    "within epochs": ({}, 8, {"validation": VALIDATION, "val_check_interval": 2}),
}


@pytest.mark.parametrize(
    ("make", "written"),
    [
        *itertools.product(LOADERS.values(), WRITTEN),
        *itertools.product([beside, lambda: beside(known=False)], ["each step, validated"]),
        (lambda: loader(seed=None), "an epoch's end"),  # a seed that was drawn is in checkpoints of an epoch's end
    ],
)
def test_from_each_checkpoint_that_is_written(tmp_path, make, written):
    when, count, options = WRITTEN[written]
    assert check_each(make, tmp_path, when=when, **options) >= count


@kinds_of_loader
def test_from_the_last_one_after_max_steps(tmp_path, make):
    options = {"max_epochs": -1, "validation": VALIDATION}
    whole = whole_run(make, tmp_path, max_steps=13, **options)
    for steps in (3, COUNTS[0], 8):
        last = ModelCheckpoint(tmp_path / str(steps), save_last=True)
        head = fit(make(), tmp_path, [StreamEpochs(), last], max_steps=steps, **options)
        tail = resumed(make, tmp_path, tmp_path / str(steps) / "last.ckpt", max_steps=13, **options)
        assert head.trained + tail.trained == whole.trained
        assert tail.events.count("validated") + head.events.count("validated") == whole.events.count("validated")


class Carrying(Model):
    """Sums up each stream, and fails after a batch's sum was kept."""

    def __init__(self, fail=0):
        super().__init__()
        self.carriers, self.sums, self.fail = Carriers(), [], fail

    def training_step(self, batch, index):
        counts = self.carriers.count(batch, batch.data)
        if len(self.sums) + 1 == self.fail:
            raise Break
        self.sums.append(counts)
        return super().training_step(batch, index)


@kinds_of_loader
@pytest.mark.parametrize("fail", [1, 3, 7])
def test_what_is_carried_is_as_of_the_last_batch_trained_on(tmp_path, make, fail):
    def run(model, *callbacks, **options):
        return fit(make(), tmp_path, [StreamEpochs(carry=model.carriers.all), *callbacks], model=model, **options)

    whole = run(Carrying())
    save = OnExceptionCheckpoint(tmp_path, f"{fail}")
    head = run(Carrying(fail), save)
    tail = run(Carrying(), checkpoint=save.ckpt_path)
    assert len(head.sums) == fail - 1
    assert head.sums + tail.sums == whole.sums


class OtherLanes(Model):
    """Carries along, checks what is carried, and fails before a batch."""

    def __init__(self, fail=None):
        super().__init__()
        self.carriers, self.read, self.went_on, self.fail = Carriers(), [], [], fail

    def training_step(self, batch, index):
        if len(self.went_on) == self.fail:
            raise Break
        self.went_on.append(int((~batch.reset).sum()))
        self.read += check_carried(batch, self.carriers)
        return super().training_step(batch, index)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 4)])
def test_what_is_carried_goes_to_another_number_of_lanes(tmp_path, groups, before, after):
    lengths = [9 + i % 7 for i in range(24)]

    def run(lanes, model, *callbacks, changes=(), **options):
        dataset = StreamDataset(lengths, open_stream, lanes, time_steps=3, shuffle=True, seed=0, lengths=lengths)
        callbacks = [StreamEpochs(carry=model.carriers.all, changes=changes), *callbacks]
        given = {"model": model, "max_epochs": 1, **options}
        return fit(StreamDataLoader(dataset, virtual_ranks=groups), tmp_path, callbacks, **given)

    save = OnExceptionCheckpoint(tmp_path, "saved")
    head = run(before, OtherLanes(4), save)
    if before != after:
        with pytest.raises(StateError, match="batch_size"):
            run(after, OtherLanes(), checkpoint=save.ckpt_path)
    tail = run(after, OtherLanes(), changes="batch_size", checkpoint=save.ckpt_path)
    assert 0 < tail.went_on[0] <= min(before, after)
    assert sorted(head.read + tail.read) == [(i, j) for i, length in enumerate(lengths) for j in range(length)]


@pytest.mark.parametrize("known", [True, False])
def test_from_a_source_that_broke(tmp_path, known):
    reads = []

    def break_once(length):
        for item in open_stream(length):
            reads.append(1)
            if len(reads) == 25:
                raise Break
            yield item

    whole, save, head = whole_run(LOADERS["known"], tmp_path), OnExceptionCheckpoint(tmp_path), Model()
    broken = loader(known, open_stream=break_once)
    with pytest.raises(ReadError):
        trainer_of(tmp_path, [StreamEpochs(), save]).fit(head, broken)
    tail = resumed(lambda: loader(known), tmp_path, save.ckpt_path)
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

    assert check_each(make, tmp_path, when=EACH) >= 15


class Asking(Model):
    """Asks for the number of steps before the first."""

    def configure_optimizers(self):
        self.asked = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Collated(Model):
    def training_step(self, batch, index):
        self.trained.append(batch.flatten().tolist())
        return self.layer(batch).mean()


class Taking(Model):
    """Takes batches itself, with an index of which Lightning begins at 0 when it resumes."""

    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@kinds_of_loader
def test_where_steps_were_counted_before_and_where_loaders_are_made_anew_each_epoch(tmp_path, make):
    class Making(Model):
        def train_dataloader(self):
            return make()

    assert check_each(make, tmp_path / "asked", when={"every_n_train_steps": 8}, model=Asking) >= 2
    assert check_each(lambda: None, tmp_path, when=EACH, model=Making, reload_dataloaders_every_n_epochs=1) >= ALL


@pytest.mark.parametrize("known", [True, False])
def test_a_loader_with_a_collate_fn_and_a_step_that_takes_the_iterator(tmp_path, known):
    def make():
        return StreamDataLoader(loader(known).dataset, collate_fn=lambda windows: torch.stack(windows, 1))

    assert check_each(make, tmp_path, when={"every_n_train_steps": 3}, model=Collated) == ALL // 3
    taken, when = tmp_path / "taken", {"every_n_train_steps": 2}
    assert check_each(lambda: loader(known), taken, when=when, model=Taking, validation=VALIDATION) == ALL // 2


def test_other_sources_are_an_error_within_an_epoch_and_a_warning_between_two(tmp_path):
    def other():
        return StreamDataLoader(StreamDataset([4, 4], open_stream, 2, time_steps=2, seed=0))

    fit(loader(), tmp_path, [StreamEpochs(), saving(tmp_path, every_n_train_steps=4)], max_epochs=1)
    fit(loader(), tmp_path, [StreamEpochs(), saving(tmp_path)], max_epochs=1)
    (_, within), (_, between) = saved_in(tmp_path)
    with pytest.raises(StateError):
        resumed(other, tmp_path, within)
    with pytest.warns(UserWarning, match="read from its beginning, without the loader's state: .*shuffle"):
        tail = resumed(other, tmp_path, between, max_epochs=2)
    assert [(epoch, step) for epoch, step, _ in tail.trained] == [(1, 0), (1, 1)]


@kinds_of_loader
def test_the_state_in_a_checkpoint_is_the_loaders_own(tmp_path, make):
    whole = fit(make(), tmp_path, [StreamEpochs(), saving(tmp_path, every_n_train_steps=4)], max_epochs=1)
    ((before, path),) = saved_in(tmp_path)
    (state,) = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    plain = make()
    plain.load_state_dict(state)
    assert [key(batch) for batch in plain] == whole.trained[before:]


class Steps(lightning.loggers.logger.DummyLogger):
    """The steps that a logger is told."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_metrics(self, metrics, step):
        if "loss" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize(
    "options",
    [{}, {"validation": VALIDATION}, {"validation": VALIDATION, "max_steps": 13, "max_epochs": -1}],
    ids=["alone", "validated", "steps"],
)
@pytest.mark.parametrize("when", [EACH, {}], ids=["each step", "epochs"])
def test_loggers_are_told_the_steps_of_a_run_without_a_break(tmp_path, when, options):
    class Logging(Model):
        def training_step(self, batch, index):
            self.log("loss", 1.0)
            return super().training_step(batch, index)

    def steps_of(*callbacks, **more):
        logger = Steps()
        values = {"log_every_n_steps": 1, "logger": logger, "model": Logging()} | options | more
        fit(loader(), tmp_path, [StreamEpochs(), *callbacks], **values)
        return logger.steps

    whole = steps_of(saving(tmp_path, **when))
    assert whole == list(range(options.get("max_steps", ALL)))
    for before, path in saved_in(tmp_path):
        assert steps_of(checkpoint=path) == whole[before:], path


@pytest.mark.slow
def test_two_ranks_go_on_from_each_checkpoint(tmp_path):
    script = ROOT / "tests" / "trainers" / "lightning_epochs_ddp.py"
    output = run_program(script, tmp_path, ranks=2, folder=tmp_path)
    assert output.count(" ok") == 2 * 3, "kinds of loaders on each rank"
