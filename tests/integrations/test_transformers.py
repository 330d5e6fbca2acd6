"""Hugging Face's Trainer, the real package: a stream is trained on as one run, whole, and goes on from checkpoints."""

import importlib.util
import itertools

import numpy as np
import pytest
import torch
from carried import Carriers, check_carried
from helpers import run_trainer

from stream_dataloader import StateError, StreamDataLoader, StreamDataset, get_stream_info, side_by_side

pytestmark = [
    pytest.mark.slow,  # to import transformers takes seconds
    pytest.mark.filterwarnings("ignore"),  # warnings are theirs
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

LENGTHS = [9, 14, 3, 12, 8, 7, 11, 5]


def open_stream(length):
    source = get_stream_info().source_index
    return iter([{"x": np.full(3, 100 * source + i, np.float32), "labels": i} for i in range(length)])


def dataset(*, known=True, **options):
    if known:
        options["lengths"] = LENGTHS
    fill = {"labels": -100}
    given = {"time_steps": 3, "shuffle": True, "seed": 0, "fill_value": fill} | options
    return StreamDataset(LENGTHS, open_stream, 2, **given)


def loader(workers=0, *, collate_fn=None, **options):
    return StreamDataLoader(dataset(**options), workers, collate_fn)


def beside(known):
    """A loader whose lanes are those of `loader`, and one of a run without an end."""
    run = dataset(known=False, seed=1, padding_mode="cycle")
    return side_by_side([(dataset(known=known), 2), (run, 1)])


class Model(torch.nn.Module):
    """Keeps what it was trained on; dropout shows whether random numbers are the same after a resume."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.evaluated = torch.nn.Linear(3, 1), [], []

    def forward(self, x, labels, reset):
        seen = self.seen if self.training else self.evaluated
        seen.append((x.tolist(), labels.tolist(), reset.tolist()))
        predicted = torch.nn.functional.dropout(self.layer(x / 1000), 0.5, self.training)
        return {"loss": predicted.square().mean(), "logits": predicted}


def seen_of(batch):
    data = {name: leaf.transpose(0, 1).tolist() for name, leaf in batch.data.items()}
    return data["x"], data["labels"], batch.reset.tolist()


def whole_of(number, **options):
    bare = loader(**options)
    return [seen_of(batch) for _ in range(number) for batch in bare]


@pytest.fixture
def trainer_of(tmp_path):
    """Makes a trainer as a fresh process has it."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    from stream_dataloader.integrations.transformers import StreamTrainer

    def reset():
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)

    def build(train, *, kind=StreamTrainer, folder="run", model=None, extra=None, **options):
        reset()
        given = {"save_strategy": "no", "logging_steps": 1, "learning_rate": 0.1, "disable_tqdm": True} | options
        args = TrainingArguments(str(tmp_path / folder), use_cpu=True, report_to=[], **given)
        torch.manual_seed(0)
        return kind(model or Model(), args, train_dataset=train, **(extra or {}))

    yield build
    reset()


@pytest.mark.parametrize("given", [loader, dataset])
def test_every_epoch_is_whole(trainer_of, given):
    assert len(whole_of(2)) != 2 * len(whole_of(1)), "not the case that is meant"
    trainer = trainer_of(given(), num_train_epochs=3)
    trainer.train()
    seen = trainer.model.seen
    planned = -(-len(whole_of(3)) // 3) * 3
    assert len(seen) == planned == trainer.state.max_steps == trainer.state.global_step
    assert seen == whole_of(4)[:planned]
    assert trainer.state.epoch == 3
    for again in (trainer, trainer_of(given(), num_train_epochs=3, model=trainer.model)):
        again.model.seen = []
        again.train()
        assert again.model.seen == seen


def test_without_lengths_max_steps_says_how_long(trainer_of):
    trainer = trainer_of(loader(known=False), max_steps=33)
    trainer.train()
    assert trainer.model.seen == whole_of(4)[:33]
    with pytest.raises(ValueError, match="max_steps"):
        trainer_of(loader(known=False), num_train_epochs=1).train()


@pytest.mark.parametrize("steps", [2, 5])
def test_gradients_are_accumulated_over_the_ends_of_epochs(trainer_of, steps):
    trainer = trainer_of(loader(), num_train_epochs=3, gradient_accumulation_steps=steps)
    trainer.train()
    batches = -(-len(whole_of(3)) // 3)
    assert trainer.model.seen == whole_of(4)[: 3 * batches]
    assert trainer.state.global_step == 3 * -(-batches // steps)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def interrupted(trainer_of, stop, train, **options):
    """Two runs in one: the first is cut off after so many optimizer steps, the second goes on from its checkpoint."""
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == stop:
                control.should_save = control.should_training_stop = True

    first = trainer_of(train(), folder=f"stopped{stop}", extra={"callbacks": [Stops()]}, **options)
    first.train()
    second = trainer_of(train(), folder=f"stopped{stop}", **options)
    second.train(resume_from_checkpoint=True)
    return first, second


def check_stops(trainer_of, train, stops, **options):
    """Runs that are cut off go on as one that is not, with the same losses; it is returned."""
    whole = trainer_of(train(), **options)
    whole.train()
    for stop in stops:
        first, second = interrupted(trainer_of, stop, train, **options)
        assert first.model.seen + second.model.seen == whole.model.seen, stop
        assert losses(first) == losses(whole)[:stop]
        assert losses(second) == losses(whole)
        assert second.state.epoch == whole.state.epoch
    return whole


@pytest.mark.parametrize(
    ("train", "options"),
    [
        (loader, {"num_train_epochs": 3}),
        (loader, {"num_train_epochs": 3, "gradient_accumulation_steps": 4}),
        (lambda: loader(known=False), {"max_steps": 30}),
        (lambda: loader(known=False), {"max_steps": 12, "gradient_accumulation_steps": 3}),
        (lambda: beside(True), {"num_train_epochs": 3}),
        (lambda: beside(False), {"max_steps": 30}),
    ],
)
def test_a_checkpoint_goes_on_at_the_next_batch_with_the_same_losses(trainer_of, train, options):
    assert len(losses(check_stops(trainer_of, train, (1, 6, 10, 11), **options))) > 10


def test_it_goes_on_with_other_workers_and_opens_each_stream_once(trainer_of):
    counts, opened = iter([0, 2, 0]), []
    check_stops(trainer_of, lambda: loader(next(counts)), [5], num_train_epochs=2)

    def watched(length):
        opened.append(length)
        return open_stream(length)

    def build():
        return StreamDataLoader(StreamDataset(LENGTHS, watched, 2, time_steps=3, seed=0, lengths=LENGTHS, lookahead=0))

    _, second = interrupted(trainer_of, 9, build, max_steps=10)
    assert len(second.model.seen) == 1
    assert len(opened) <= len(LENGTHS) + 3, "streams that were over are not opened again"


def test_batches_that_another_callback_left_unused_come_first(trainer_of, tmp_path):
    from transformers import TrainerCallback

    class LeavesEpoch(TrainerCallback):
        seen = 0

        def on_substep_end(self, args, state, control, **_):
            self.seen += 1
            control.should_epoch_stop = self.seen == 3  # the second of four batches that were fetched together
            control.should_save = self.seen == 3

    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 4, "folder": "left"}
    trainer = trainer_of(loader(), extra={"callbacks": [LeavesEpoch()]}, **options)
    trainer.train()
    assert trainer.model.seen == whole_of(3)[: len(trainer.model.seen)]


def test_it_evaluates_and_predicts(trainer_of):
    def metrics(prediction, compute_result):
        return {"shape": prediction.predictions.shape[-1]} if compute_result else {}

    given = {"eval_dataset": {"a": dataset(shuffle=False), "b": loader(seed=3)}, "compute_metrics": metrics}
    evaluating = {"eval_strategy": "steps", "eval_steps": 4, "batch_eval_metrics": True}
    trainer = trainer_of(loader(), max_steps=10, extra=given, **evaluating)
    trainer.train()
    assert trainer.model.seen == whole_of(3)[:10]
    expected = whole_of(1, shuffle=False) + whole_of(1, seed=3)
    assert trainer.model.evaluated == expected * 3  # at the end, too
    told = [entry for entry in trainer.state.log_history if "eval_a_shape" in entry]
    assert [entry["step"] for entry in told] == [4, 8, 10]
    assert {"eval_a_loss", "eval_a_shape"} <= set(told[0])
    trainer.model.evaluated = []
    assert trainer.evaluate(eval_dataset=loader(known=False))["eval_shape"] == 1
    assert trainer.model.evaluated == whole_of(1)
    assert trainer.predict(loader(collate_fn=collated)).predictions.shape[1:] == (3, 1)
    for wrong in (dataset(padding_mode="cycle"), trainer.train_dataset):
        with pytest.raises(ValueError, match=r"has none|build another"):
            trainer.evaluate(eval_dataset=wrong)


def collated(windows):
    window = {name: torch.stack([window[name] for window in windows]) for name in ("x", "labels")}
    return window | {"reset": torch.zeros(2, dtype=torch.bool)}


def test_a_collate_fn_makes_the_arguments(trainer_of):
    whole = check_stops(trainer_of, lambda: loader(collate_fn=collated), (3, 13), num_train_epochs=2)
    assert [seen[:2] for seen in whole.model.seen[:5]] == [seen[:2] for seen in whole_of(1)[:5]]


def test_other_datasets_are_left_to_the_trainer(trainer_of):
    items = [{"x": torch.zeros(1, 3), "labels": torch.zeros(1), "reset": torch.zeros(1)}] * 16
    trainer = trainer_of(items, num_train_epochs=1, extra={"eval_dataset": items})
    trainer.train()
    assert len(trainer.model.seen) == 2
    assert "eval_loss" in trainer.evaluate()
    assert len(trainer.predict(items).predictions) == 16


def test_a_checkpoint_without_the_place_is_refused(trainer_of, tmp_path):
    from stream_dataloader.integrations.transformers import STATE_NAME

    trainer_of(loader(), max_steps=4, save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "run" / "checkpoint-2"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert list(folder.glob("*.part")) == []
    with pytest.raises(StateError, match="time_steps"):
        trainer_of(loader(seed=0, time_steps=4), max_steps=4).train(resume_from_checkpoint=str(folder))
    (folder / STATE_NAME).unlink()
    with pytest.raises(StateError, match=STATE_NAME):
        trainer_of(loader(), max_steps=4).train(resume_from_checkpoint=folder)


def test_what_cannot_be_trained_on_is_refused(trainer_of, monkeypatch):
    from transformers import Trainer

    with pytest.raises(ValueError, match="auto_find_batch_size"):
        trainer_of(loader(), auto_find_batch_size=True).train()
    with pytest.raises(TypeError, match="Tensor"):
        trainer_of(StreamDataset([range(9)], iter, 1, time_steps=2), max_steps=1).train()
    with pytest.raises(TypeError, match="Tensor"):
        trainer_of(loader(collate_fn=lambda windows: windows[0]["x"]), max_steps=1).train()
    for workers in (0, 2):
        with pytest.raises(TypeError, match="use StreamTrainer of"):
            trainer_of(dataset(), kind=Trainer, max_steps=2, dataloader_num_workers=workers).train()
    trainer = trainer_of(loader())
    monkeypatch.setattr(type(trainer.args), "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs"):
        trainer.get_train_dataloader()


def test_batches_come_on_the_trainers_device(trainer_of, monkeypatch):
    trainer = trainer_of(loader())
    monkeypatch.setattr(type(trainer.args), "device", torch.device("meta"))
    batch = next(iter(trainer.get_train_dataloader()))
    assert {tensor.device.type for tensor in batch.values()} == {"meta"}


def test_a_class_with_arguments_of_its_own_trains_too(trainer_of):
    from transformers import Trainer

    from stream_dataloader.integrations.transformers import StreamTrainerMixin

    class Own(Trainer):
        def __init__(self, *args, factor, **kwargs):
            super().__init__(*args, **kwargs)
            self.factor = factor

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            outputs = model(**inputs)
            return (outputs["loss"] * self.factor, outputs) if return_outputs else outputs["loss"] * self.factor

    class Mine(StreamTrainerMixin, Own):
        pass

    trainer = trainer_of(dataset(), kind=Mine, max_steps=4, extra={"factor": 2, "eval_dataset": {"a": dataset()}})
    trainer.train()
    assert trainer.model.seen == whole_of(1)[:4]
    assert "eval_a_loss" in trainer.evaluate()


def test_loaders_are_built_as_the_arguments_say(trainer_of):
    train = trainer_of(dataset(), dataloader_num_workers=2, dataloader_prefetch_factor=3).train_dataset
    assert (train.num_workers, train._settings.prefetch_factor) == (2, 3)


def test_model_inputs_take_what_forward_names():
    from stream_dataloader.integrations.transformers import ModelInputs

    class Names(torch.nn.Module):
        def forward(self, x, labels, position_ids=None, mask=None, **rest):
            raise NotImplementedError

    batch = list(loader())[-1]
    inputs = ModelInputs().of(Names())(batch)
    assert list(inputs) == ["x", "labels", "mask", "position_ids"]
    assert inputs["x"].is_contiguous()
    assert torch.equal(inputs["x"], batch.data["x"].transpose(0, 1))
    assert torch.equal(inputs["mask"], batch.mask.T)
    assert (batch.position == -1).any()
    assert torch.equal(inputs["position_ids"], batch.position.T.clamp(min=0))
    fields = {"attention_mask": "mask", "reset": "reset"}
    steps_first = ModelInputs(batch_first=False, fields=fields).of(Names())(batch)
    assert list(steps_first) == ["x", "labels", "attention_mask", "reset"]
    assert steps_first["x"] is batch.data["x"]
    assert steps_first["attention_mask"] is batch.mask
    assert ModelInputs(fields=["reset"])(batch)["reset"] is batch.reset
    for wrong, error in [(["resets"], ValueError), ("reset", TypeError), ({"x": "mask"}, ValueError)]:
        with pytest.raises(error):
            ModelInputs(fields=wrong)(batch)


def test_two_ranks_read_all_and_go_on_from_one_checkpoint(tmp_path):
    lengths = [9, 14, 3, 12, 8, 7, 11, 5, 2, 6]
    whole = run_trainer("hf_trainer_two.py", tmp_path, tmp_path / "whole", 10**6)
    assert len(whole[0]) == len(whole[1]) > 10
    read = [item for seen in whole for batch, *_ in seen for item in batch]
    items = [100 * i + j for i, length in enumerate(lengths) for j in range(length)]
    assert set(read) == set(items)
    assert len(read) >= 2 * len(items), "two epochs, whole"
    head = run_trainer("hf_trainer_two.py", tmp_path, tmp_path / "stopped", 4)
    tail = run_trainer("hf_trainer_two.py", tmp_path, tmp_path / "stopped", 0)
    assert [mine + rest for mine, rest in zip(head, tail, strict=True)] == whole
    (alone,) = run_trainer("hf_trainer_two.py", tmp_path, tmp_path / "stopped", 0, ranks=1)
    assert [seen[2] for seen in alone] == [one[2] + other[2] for one, other in zip(*tail, strict=True)]


def test_evaluations_are_where_they_were_with_ignore_data_skip(trainer_of, tmp_path):
    options = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4}

    def evaluations(trainer, **resume):
        trainer.train(**resume)
        return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]

    extra = {"eval_dataset": dataset()}
    whole = evaluations(trainer_of(loader(), extra=extra, **options))
    trainer = trainer_of(loader(), extra=extra, ignore_data_skip=True, **options)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert evaluations(trainer, resume_from_checkpoint=checkpoint) == whole
    assert trainer.args.ignore_data_skip


def test_epochs_of_n_batches_are_the_trainers(trainer_of):
    def build():
        return StreamDataLoader(dataset(padding_mode="cycle"), batches_per_epoch=5)

    whole = check_stops(trainer_of, build, (1, 3, 5), num_train_epochs=3, gradient_accumulation_steps=2)
    assert whole.model.seen == [seen_of(batch) for batch in itertools.islice(loader(padding_mode="cycle"), 15)]
    assert whole.state.global_step == 9
    for _ in range(2):
        whole.evaluate(eval_dataset=build())
    assert whole.model.evaluated == whole.model.seen[:5] * 2


class OtherLanes(torch.nn.Module):
    """Carries along, checks what is carried, and fails before a batch."""

    def __init__(self, fail=None):
        super().__init__()
        self.layer, self.carriers, self.fail = torch.nn.Linear(3, 1), Carriers(), fail
        self.read, self.went_on = [], []

    def forward(self, batch):
        if len(self.went_on) == self.fail:
            raise KeyboardInterrupt
        self.went_on.append(int((~batch.reset).sum()))
        self.read += check_carried(batch, self.carriers)
        return {"loss": self.layer(batch.data["x"] / 1000).square().mean()}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 4)])
def test_what_is_carried_goes_to_another_number_of_lanes(trainer_of, groups, before, after):
    lengths = [9 + i % 7 for i in range(24)]

    def trainer(lanes, model, changes=(), **options):
        given = StreamDataset(lengths, open_stream, lanes, time_steps=3, shuffle=True, seed=0, lengths=lengths)
        extra = {"carry": model.carriers.all, "changes": changes, "model_inputs": lambda batch: {"batch": batch}}
        loader = StreamDataLoader(given, virtual_ranks=groups)
        return trainer_of(loader, model=model, extra=extra, save_strategy="steps", save_steps=1, **options)

    head, tail = OtherLanes(3), OtherLanes()
    with pytest.raises(KeyboardInterrupt):
        trainer(before, head, max_steps=4).train()
    if before != after:
        with pytest.raises(StateError, match="batch_size"):
            trainer(after, OtherLanes(), max_steps=9).train(resume_from_checkpoint=True)
    trainer(after, tail, ["batch_size"], max_steps=9).train(resume_from_checkpoint=True)
    assert 0 < tail.went_on[0] <= min(before, after)
    found = head.read + tail.read
    assert len(tail.went_on) == 6
    assert len(set(found)) == len(found), "an item came twice"
