"""Lightning reads, validates and counts epochs as they are: the real package."""

import functools
import gc
import logging
import math
import warnings

import pytest

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning_runs import COUNTS, Model, cycling, fit, key, loader, trainer_of  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from stream_dataloader import StreamDataLoader, StreamDataset  # noqa: E402
from stream_dataloader.integrations.lightning import ExactResume, StreamEpochs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
VALIDATION = DataLoader(range(2))


def epochs(known=True, count=3, **options):
    plain = loader(known, **options)
    return [[key(batch) for batch in plain] for _ in range(count)]


def flat(lists):
    return [each for one in lists for each in one]


@pytest.mark.parametrize("known", [True, False])
def test_every_epoch_is_read_to_its_end_and_validated_there(tmp_path, known):
    model = fit(loader(known), tmp_path, [StreamEpochs()], validation=VALIDATION)
    assert model.trained == flat(epochs(known))
    expected = [[*((e, i) for i in range(count)), "validated", "end"] for e, count in enumerate(COUNTS)]
    assert model.events == flat(expected)


def test_half_epochs_are_halves_of_each_epoch(tmp_path):
    model = fit(loader(), tmp_path, [StreamEpochs()], validation=VALIDATION, val_check_interval=0.5)
    before = [model.events[i - 1] for i, event in enumerate(model.events) if event == "validated"]
    halves = [(e, n - 1) for e, count in enumerate(COUNTS) for n in range(count // 2, count + 1, count // 2)]
    assert before == halves


@pytest.mark.parametrize(("known", "order"), [(True, 1), (True, -1), (False, 1)])
def test_bars_show_the_epochs_own_length_wherever_the_callback_stands(tmp_path, known, order):
    class Bar(lightning.callbacks.ProgressBar):
        def on_train_epoch_start(self, trainer, module):
            totals.append(self.total_train_batches)

    totals = []
    fit(loader(known), tmp_path, [Bar(), StreamEpochs()][::order], enable_progress_bar=True)
    assert totals == (COUNTS if known else [math.inf] * 3)


@pytest.mark.parametrize("known", [True, False])
def test_epochs_have_lightnings_numbers(tmp_path, known):
    train = loader(known)
    train.set_epoch(7)
    model = fit(train, tmp_path, [StreamEpochs()], max_epochs=2)
    assert model.trained == flat(epochs(known, 2))
    again = fit(train, tmp_path, [StreamEpochs()], max_epochs=1)  # another trainer counts from 0
    assert again.trained == epochs(known, 1)[0]


@pytest.mark.parametrize("callback", [StreamEpochs, ExactResume])
def test_a_long_epoch_keeps_the_places_of_the_last_batches_alone(tmp_path, callback):
    class Counts(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            if number in (50, 250):
                found.append(sum(isinstance(one, functools.partial) for one in gc.get_objects()))

    found, dataset = [], StreamDataset([600], range, 1, time_steps=2)
    fit(StreamDataLoader(dataset), tmp_path, [callback(), Counts()], model=Untrained(), max_epochs=1)
    assert found[1] < found[0] + 50, "places are kept as functions, one a batch"


class Untrained(Model):
    def training_step(self, batch, index):
        return self.layer(batch.data[:, :, None].float()).mean()


def test_fit_with_another_loader_takes_nothing_of_the_first_ones_run(tmp_path):
    trainer, model, other = trainer_of(tmp_path, [StreamEpochs()], max_epochs=1), Model(), cycling()
    trainer.fit(model, cycling(seed=5))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, cycling())
    other.set_epoch(1)
    assert model.trained[6:] == [key(batch) for _ in range(2) for batch in other]


@pytest.mark.parametrize("known", [True, False])
def test_fit_called_twice_goes_on_with_the_next_epoch(tmp_path, known):
    trainer, model, train = trainer_of(tmp_path, [StreamEpochs()], max_epochs=1), Model(), loader(known)
    trainer.fit(model, train)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, train)
    assert model.trained == flat(epochs(known))
    assert "_load_combined_loader_states" not in vars(trainer.fit_loop), "Lightning is left as it was"


@pytest.mark.parametrize("known", [True, False])
def test_the_last_accumulated_step_of_each_epoch_is_done(tmp_path, known):
    model = fit(loader(known), tmp_path, [StreamEpochs()], accumulate_grad_batches=4)
    assert model.trainer.global_step == sum(math.ceil(count / 4) for count in COUNTS)


LIMITS = [
    ({"limit_train_batches": 4}, [True, False], lambda epochs: flat(epoch[:4] for epoch in epochs)),
    ({"limit_train_batches": 0.5}, [True], lambda epochs: flat(epoch[: len(epoch) // 2] for epoch in epochs)),
    ({"max_epochs": -1, "max_steps": 13}, [True, False], lambda epochs: flat(epochs)[:13]),
    ({"overfit_batches": 2}, [True], lambda epochs: epochs[0][:2] * 3),
]


@pytest.mark.parametrize(("options", "kinds", "expected"), LIMITS)
def test_limits_hold(tmp_path, options, kinds, expected):
    for known in kinds:
        model = fit(loader(known), tmp_path, [StreamEpochs()], validation=VALIDATION, **options)
        assert model.trained == expected(epochs(known))


def test_without_the_callback_it_overfits_on_the_first_batches_and_seeds_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # as seed_everything(workers=True) does
    train = StreamDataLoader(loader().dataset, 2)
    model = fit(train, tmp_path, max_epochs=2, overfit_batches=2)
    assert [seen[:2] for seen in model.trained] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert train.worker_init_fn.func.__name__ == "pl_worker_init_function"


def fit_anew(make, folder):
    class Making(Model):
        def train_dataloader(self):
            return make()

    return fit(None, folder, [StreamEpochs()], model=Making(), reload_dataloaders_every_n_epochs=1)


@pytest.mark.parametrize("known", [True, False])
def test_loaders_that_are_made_anew_have_lightnings_numbers(tmp_path, known):
    assert fit_anew(lambda: loader(known), tmp_path).trained == flat(epochs(known))


def test_epochs_of_n_batches_are_stretches_of_one_run(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*set_epoch")
        model = fit(cycling(), tmp_path, [StreamEpochs()], validation=VALIDATION, val_check_interval=0.5)
        plain = cycling()
        assert model.trained == flat([key(batch) for batch in plain] for _ in range(3))
        assert model.events.count("validated") == 6
        assert fit_anew(cycling, tmp_path).trained == model.trained
        same = fit(cycling(), tmp_path, [StreamEpochs()], overfit_batches=2)
        assert same.trained == model.trained[:2] * 3


@pytest.mark.parametrize(
    ("mode", "known", "others"),
    [("max_size_cycle", True, 3), ("max_size_cycle", False, 3), ("max_size", False, 3), ("min_size", True, 100)],
)
def test_it_may_be_one_of_several_loaders(tmp_path, mode, known, others):
    train = CombinedLoader({"a": loader(known), "b": DataLoader(range(others))}, mode)
    model = fit(train, tmp_path, [StreamEpochs()], validation=VALIDATION)
    assert [batch["a"] for batch in model.trained] == flat(epochs(known))
    assert model.events.count("validated") == 3
    if mode != "max_size":
        assert [batch["b"].item() for batch in model.trained] == flat([i % others for i in range(n)] for n in COUNTS)


@pytest.mark.parametrize("same", [True, False])
def test_validation_reads_the_same_each_time_or_the_epoch_trained_on(tmp_path, same):
    class Validating(Model):
        def validation_step(self, batch, index):
            if not self.trainer.sanity_checking:
                seen.append((self.current_epoch, key(batch)))

        test_step = predict_step = validation_step

    seen, train, callbacks = [], loader(known=False), [StreamEpochs(same_validation=same)]
    fit(train, tmp_path, callbacks, model=Validating(), validation=loader(known=False), num_sanity_val_steps=1)
    expected = [(epoch, batch) for epoch in range(3) for batch in epochs(False)[0 if same else epoch]]
    assert seen == expected
    trainer, data, seen = trainer_of(tmp_path, [StreamEpochs()]), loader(known=False), []
    for evaluate in (trainer.validate, trainer.test, trainer.predict) * 2:
        evaluate(Validating(), data)
    assert [batch for _, batch in seen] == 6 * epochs(False)[0]


def test_a_mean_is_weighed_by_lanes_without_a_guess(tmp_path):
    class Logging(Model):
        def training_step(self, batch, index):
            self.log("loss", 1.0, on_epoch=True)
            assert self.trainer._results.batch_size == len(batch) == 2
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.log("error", 1.0)
            assert self.trainer._results.batch_size == 2

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*infer the `batch_size`.*")
        fit(loader(), tmp_path, [StreamEpochs()], model=Logging(), validation=loader(known=False), max_epochs=1)


def test_the_former_name_is_the_same_and_two_are_as_good_as_one(tmp_path):
    model = fit(loader(), tmp_path, [ExactResume(), StreamEpochs()], validation=VALIDATION)
    assert model.trained == flat(epochs())
    assert model.events.count("validated") == 3


def test_a_lightning_it_does_not_know_is_an_error(tmp_path, monkeypatch):
    from lightning.pytorch.loops.fit_loop import _FitLoop

    monkeypatch.delattr(_FitLoop, "_load_combined_loader_states")
    with pytest.raises(RuntimeError, match=r"FitLoop\._load_combined_loader_states"):
        fit(loader(), tmp_path, [StreamEpochs()])


def test_who_forgets_the_callback_is_told_once(tmp_path):
    warned = "first, 6 batches, and epoch 1 has 5"
    with pytest.warns(RuntimeWarning, match=warned) as told:
        model = fit(loader(), tmp_path, max_epochs=5, validation=VALIDATION)
    assert sum("StreamEpochs" in str(each.message) for each in told) == 1
    assert len(model.trained) < 5 * 6
    assert model.events.count("validated") < 5  # what it is told about
    with pytest.warns(RuntimeWarning, match=warned):
        fit(loader(), tmp_path, validation=loader())


def test_nobody_else_is_told(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Lightning keeps")
        fit(loader(), tmp_path, [StreamEpochs()], validation=VALIDATION)
        fit(loader(shuffle=False), tmp_path, validation=loader(shuffle=False))
        fit(loader(known=False), tmp_path, validation=loader(known=False))
        train = loader()
        for _ in range(3):  # it asks anew each time
            fit(train, tmp_path, max_epochs=1)
        for _ in range(3):
            assert len(train) > len(list(train)) - 3
