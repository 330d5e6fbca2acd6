"""Several datasets read together: the order of draws, the batches, resume, and what is refused."""

import collections
import itertools
import json
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import cells, check_epoch, key, keys
from helpers import FULL, random_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from mixtures import OfList, mixture_of, mixtures

from stream_dataloader import StreamDataLoader, StreamDataset, errors, interleave
from stream_dataloader.testing import check_resume


def plain(sources=(3, 4), open_stream=range, batch_size=2, **options):
    return StreamDataset(list(sources), open_stream, batch_size, **({"time_steps": 2} | options))


# The order of sources


def test_the_order_within_a_list_is_the_lists_own():
    lengths, weights = [1 + i % 5 for i in range(20)], [1, 1, 1]
    mixture = mixture_of([[3] * 20, [3] * 20, lengths], weights)
    datasets = list(mixture.datasets())
    options = {"lengths": lengths, "schedule": "longest_first"}
    datasets[2] = StreamDataset(datasets[2].sources, OfList(2), 2, time_steps=2, **options)
    dataset = interleave(datasets, weights, seed=3)
    orders = [[], [], []]
    for number, index in map(dataset.locate, mixture.drawn(dataset)):
        orders[number].append(index)
    assert orders[0] == list(range(20))
    assert orders[1] != list(range(20))
    assert sorted(orders[1]) == sorted(orders[2]) == list(range(20))
    assert [lengths[index] for index in orders[2]] == sorted(lengths, reverse=True)


def test_each_pass_over_a_list_is_shuffled_anew():
    mixture = mixture_of([[1] * 8, [1] * 8, [1] * 64], exhausted="repeat", shuffles=(True, True, False))
    dataset = mixture.dataset()
    firsts = [[s for s in mixture.drawn(dataset, epoch) if s // 8 == number] for epoch in (0, 1) for number in (0, 1)]
    passes = [tuple(s % 8 for s in first[8 * i : 8 * i + 8]) for first in firsts for i in range(8)]
    assert len(set(passes)) == 32  # of 8! orders: no pass, list or epoch is like another
    assert all(sorted(one) == list(range(8)) for one in passes)
    unshuffled = mixture_of(mixture.lists, exhausted="repeat", shuffles=(False,) * 3)
    assert [s for s in unshuffled.drawn(unshuffled.dataset()) if s < 8] == list(range(8)) * 8


# Batches


def counts(batches):
    found = [cell for batch in batches for lane in cells(batch) for cell in lane if cell]
    return collections.Counter((source, position) for source, position, fresh, *_ in found if fresh)


def draws_of(mixture, dataset):
    drawn = collections.Counter(mixture.drawn(dataset))
    return {(source, p): times for source, times in drawn.items() for p in range(mixture.lengths[source])}


@random_cases(2000, 40)
@given(mixtures(), st.integers(1, 12))
def test_batches_in_process_are_those_of_the_serial_model(mixture, steps):
    endless, known = mixture.padding_mode == "cycle", None not in mixture.cut[: len(mixture.lists)]
    assume(not endless or any(mixture.lengths))
    loader = StreamDataLoader(mixture.dataset())
    count = len(loader) if known and not endless else None
    batches = check_epoch(loader, mixture, steps=steps if endless else None)
    assert count in (None, len(batches))
    if mixture.padding_mode in ("zeros", "data"):
        found = counts(batches)
        assert {source for source, _ in found} == {source for source, length in enumerate(mixture.lengths) if length}
        assert mixture.exhausted == "repeat" or set(found.values()) <= {1}


def test_cycle_mixes_by_weight_for_ever_and_each_pass_over_a_dataset_is_an_epoch_of_it():
    mixture = mixture_of([[1] * 3, [1] * 30], [3, 1], None, padding_mode="cycle", lanes=1, time_steps=1, lookahead=0)

    def begun_by(dataset, steps):
        """Of each stream that begins: list, a random draw, epoch, repeat."""
        batches = itertools.islice(StreamDataLoader(dataset), steps)
        return [start for batch in batches for start in batch.data[batch.is_first][:, 2:].tolist()]

    begun = begun_by(mixture.dataset(), 400)
    numbers = [number for number, *_ in begun]
    assert abs(numbers.count(0) - 300) <= 2
    assert [epoch for number, _, epoch, _ in begun if number == 0] == [i // 3 for i in range(numbers.count(0))]
    assert [epoch for number, _, epoch, _ in begun if number == 1] == [i // 30 for i in range(numbers.count(1))]
    assert {repeat for *_, repeat in begun} == {0}
    assert len({draw for _, draw, *_ in begun}) == 400
    begun = begun_by(mixture.dataset(exhausted="leave_out"), 330)  # each pass over all is an epoch
    assert [number for number, *_ in begun].count(0) == 30
    assert [epoch for _, _, epoch, _ in begun] == [i // 33 for i in range(330)]


def test_what_comes_again_is_new_for_mask_and_random_draws():
    mixture = mixture_of([[2] * 3, [2] * 12], None, "repeat", lanes=2, time_steps=2)
    dataset = mixture.dataset()
    loader = StreamDataLoader(dataset)
    draws = []
    for epoch in range(2):
        batches = list(loader)
        assert sum(int(batch.mask.sum()) for batch in batches) == 2 * 24
        items = torch.cat([batch.data[batch.mask] for batch in batches])
        assert set(items[:, 4].tolist()) == {epoch}
        assert collections.Counter(items[items[:, 2] == 0][:, 5].tolist()) == dict.fromkeys(range(4), 6)
        assert set(items[items[:, 2] == 1][:, 5].tolist()) == {0}
        draws += items[:, 3].tolist()
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("sections", [None, 4])
def test_weights_by_steps_are_shares_of_time_steps(sections):
    lengths = [[3] * 20, [30, 10] * 10, [8] * 5]
    datasets = [
        StreamDataset(own, range, 1, time_steps=1, lengths=own, sections=sections and sections + number, shuffle=True)
        for number, own in enumerate(lengths)
    ]
    dataset = interleave(datasets, [1, 2, 1], weights_by="steps", padding_mode="cycle", seed=0)
    batches = list(itertools.islice(StreamDataLoader(dataset), 2000))
    steps = collections.Counter(dataset.locate(batch.source_index[0, 0])[0] for batch in batches)
    assert [round(steps[number] / 2000, 2) for number in range(3)] == [0.25, 0.5, 0.25]
    even = interleave(datasets, weights_by="steps", padding_mode="cycle", seed=0)
    batches = list(itertools.islice(StreamDataLoader(even), 1500))
    assert min(collections.Counter(even.locate(batch.source_index[0, 0])[0] for batch in batches).values()) > 485


def test_a_schedule_by_steps_divides_each_of_its_weights():
    datasets = [plain([2, 4], lengths=[2, 4]), plain([9], lengths=[9])]
    by_steps = interleave(datasets, [(0, [1, 2]), (2, [3, 0])], weights_by="steps", seed=0)
    by_hand = interleave(datasets, [(0, [1 / 3, 2 / 9]), (2, [1, 0])], seed=0)
    assert by_steps._rules == by_hand._rules


def test_repeat_with_equal_shares_lengthens_the_epoch():
    """By what the page says: an epoch has the largest dataset's sources, times the number of datasets."""
    datasets = [plain(range(count), lambda n: iter([n]), time_steps=1) for count in (90, 10)]
    counts = [
        len(
            [
                1
                for batch in StreamDataLoader(interleave(datasets, weights, exhausted="repeat", seed=0))
                for source in batch.source_index[0]
                if source >= 0
            ]
        )
        for weights in ([1, 1], [3, 1], [9, 1])
    ]
    assert counts == [180, 120, 100]


@pytest.mark.any_start_method
def test_a_function_of_the_draws_stays_in_this_process():
    lock, asked = threading.Lock(), []

    def weights(draw):  # nothing that pickle could take
        with lock:
            asked.append(draw)
        return [1, 1 + draw]

    mixture = mixture_of([[2] * 9, [3] * 9], weights, lanes=2)
    dataset = mixture.dataset()
    assert asked == list(range(18))
    expected = keys(StreamDataLoader(dataset))
    assert keys(StreamDataLoader(dataset, 2, multiprocessing_context="forkserver")) == expected
    assert keys(StreamDataLoader(replace(mixture, weights=[(n, [1, 1 + n]) for n in range(18)]).dataset())) == expected
    assert len(asked) == 18


@pytest.mark.slow
def test_a_copy_reads_the_same_also_of_functions_that_pickle_cannot_take():
    def build():
        one = StreamDataset(["abc", "de"], lambda text: map(ord, text), 2, time_steps=2, seed=1)
        return interleave([one, StreamDataset([3, 4, 5], lambda n: iter(range(n)), 2, time_steps=2)], [1, 2])

    expected = keys(StreamDataLoader(build()))
    assert [key(batch) for batch in StreamDataLoader(pickle.loads(pickle.dumps(build())))] == expected
    assert keys(StreamDataLoader(build(), 2, multiprocessing_context="spawn")) == expected


def test_sources_factories_and_places_of_all_datasets_are_at_hand():
    dataset = interleave([plain(["abc", "de"], str), plain([3, 4, 5])])
    assert dataset.sources[:] == ["abc", "de", 3, 4, 5]
    assert dataset.sources[-1] == 5
    assert list(dataset.factory_of(4)(2)) == [0, 1]
    assert [dataset.locate(i) for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert dataset.locate(torch.tensor(2)) == (1, 0)
    for ask, wrong in [(dataset.sources.__getitem__, 5), (dataset.locate, 5), (dataset.locate, -1)]:
        with pytest.raises(IndexError):
            ask(wrong)
    with pytest.raises(TypeError, match="factory_of"):
        dataset.open_stream("abc")


@pytest.mark.parametrize("workers", [0, 2])
def test_without_determinism_every_draw_still_comes_once(workers):
    mixture = mixture_of([[4, 0, 9], [2, 2, 7, 1, 5, 6]], [1, 1], "repeat", lanes=3)
    dataset = mixture.dataset(deterministic=False)
    assert counts(StreamDataLoader(dataset, workers)) == draws_of(mixture, dataset)


# Lengths


def test_lengths_of_some_are_held_to_and_make_no_len():
    other = plain([5], batch_size=1)
    loader = StreamDataLoader(interleave([plain([3, 4], batch_size=1, lengths=[3, 4]), other]))
    with pytest.raises(TypeError, match="lengths="):
        len(loader)
    assert sum(int(batch.mask.sum()) for batch in loader) == 12
    with pytest.raises(errors.LengthError) as caught:
        list(StreamDataLoader(interleave([other, plain([3, 4], batch_size=1, lengths=[3, 9])])))
    assert (caught.value.source_index, caught.value.position) == (2, 4)


@pytest.mark.parametrize("cut", [(0, None), (None, 2), (0, 3)])
def test_lengths_of_some_make_the_same_batches_with_workers(cut):
    mixture = mixture_of([[3, 2, 1, 4], [1, 3, 2]], lanes=3, time_steps=1, cut=cut)
    check_epoch(StreamDataLoader(mixture.dataset(), 2, worker_method="thread"), mixture)


# Resume


@random_cases(60, quick=4)
@given(mixtures())
def test_any_state_resumes(mixture):
    assume(any(mixture.lengths))
    seeds = itertools.chain([mixture.seed] * 2, itertools.count())  # then the state's is adopted

    def loader(workers):
        return StreamDataLoader(mixture.dataset(seed=next(seeds)), workers)

    short = mixture.padding_mode == "cycle" or not FULL
    check_resume(loader, num_workers=(0,), **({"epochs": 1, "limit": 6} if short else {}))


def test_states_of_other_lists_or_weights_are_refused():
    lists, weights = [[4, 2, 9], [2, 2, 7, 1], [3, 5]], [3, 1, 2]

    def loader(lists=lists, weights=weights, **options):
        return StreamDataLoader(mixture_of(lists, weights, **options).dataset())

    one = loader()
    list(itertools.islice(one, 2))
    state = json.loads(json.dumps(one.state_dict()))
    loader().load_state_dict(state)
    alone = StreamDataLoader(next(mixture_of(lists).datasets()))
    for other, reason in [
        (loader(weights=[3, 1, 3]), "weights"),
        (loader(lists[:2], weights[:2]), r"numbers of sources \[3, 4, 2\], and the dataset has \[3, 4\]"),
        (loader([lists[1], lists[0], lists[2]]), "numbers of sources"),
        (loader([lists[0], [2, 2, 7, 3], lists[2]]), r"other sources .*datasets\[1\]"),
        (loader(exhausted="repeat"), "exhausted"),
        (loader(shuffles=(True, True, True)), "datasets' shuffle"),
        (loader(shuffle=False), "shuffle"),
        (loader(lanes=3), "batch_size"),
        (alone, "several datasets"),
    ]:
        with pytest.raises(errors.StateError, match=reason):
            other.load_state_dict(state)
    halves = [state | {"mix": {n: v for n, v in state["mix"].items() if n != missing}} for missing in state["mix"]]
    for wrong in [alone.state_dict(), *halves]:
        with pytest.raises(errors.StateError):
            loader().load_state_dict(wrong)


# Options


def test_options_are_those_that_all_agree_on():
    options = {"windows": "packed", "padding_mode": "data", "fill_value": np.float32(2), "lookahead": 3, "retries": 1}
    options |= {"on_error": "skip", "max_failures": 4, "deterministic": False, "time_steps": 5, "batch_size": 3}
    dataset = interleave([plain(**options), plain(**options)], seed=0)
    for name, value in options.items():
        assert getattr(dataset if hasattr(dataset, name) else dataset._rules, name) == value
        with pytest.raises(ValueError, match=rf"datasets\[0\] has {name}=.* and datasets\[1\] has {name}="):
            interleave([plain(**options), plain(**{n: v for n, v in options.items() if n != name})])
    assert interleave([plain(**options), plain()], seed=0, **options)._rules == dataset._rules


def test_the_first_datasets_seed_is_all_that_counts_unless_one_is_given():
    def seeded(*seeds, **options):
        mixed = interleave([plain(range(9), seed=seed, shuffle=True) for seed in seeds], **options)
        return keys(StreamDataLoader(mixed))

    assert seeded(1, 2) == seeded(1, 3) == seeded(4, 5, seed=1)
    assert seeded(1, 2) != seeded(2, 2)


def two():
    return [plain(), plain()]


@pytest.mark.parametrize(
    ("datasets", "options", "error", "reason"),
    [
        (list, {}, ValueError, "datasets is empty"),
        (plain, {}, TypeError, r"must be a list of StreamDatasets, and is one; pass \[dataset"),
        (lambda: [plain(), [1, 2]], {}, TypeError, r"datasets\[1\]"),
        (lambda: [interleave([plain()])], {}, TypeError, r"datasets\[0\]"),
        (two, {"weights": [1]}, ValueError, "weights"),
        (two, {"weights": [1, float("nan")]}, ValueError, r"weights\[1\]"),
        (two, {"weights": [1, 1e-12]}, ValueError, r"weights\[1\]"),
        (two, {"weights": ["a", 1]}, TypeError, "weights"),
        (two, {"weights": 3}, TypeError, r"weights must be numbers, one per dataset, and are 3; or a list"),
        (two, {"weights": "31"}, TypeError, "weights must be numbers"),
        (two, {"weights": [0, 0]}, ValueError, "weights is 0 for every dataset, so nothing could be drawn"),
        (two, {"weights": [1, 0]}, ValueError, r"weights\[1\] is 0.0, .* datasets\[1\]; leave it out"),
        (
            two,
            {"weights": [1, -2]},
            ValueError,
            r"weights\[1\] is -2.0, and the weight of datasets\[1\] must be finite",
        ),
        (two, {"weights": [(0, [1, 2]), 3]}, TypeError, r"weights\[1\] is 3, and must be a pair like the others"),
        (two, {"weights": [("a", [1, 2])]}, TypeError, r"weights\[0\] begins with 'a', a str, .* number of the draw"),
        (two, {"weights": [(5, [1, 2])]}, ValueError, r"weights\[0\] holds from draw 5 on, .*\(0, weights\)"),
        (
            two,
            {"weights": [(0, [1, 2]), (9, [2, 1]), (7, [1, 1])]},
            ValueError,
            r"weights\[2\] .*draw 7 on.*draw 9 .*sort",
        ),
        (two, {"weights": [(0, [1, 2]), (7, [2])]}, ValueError, r"weights\[1\]\[1\] has 1 weights, .* 2 datasets"),
        (
            two,
            {"weights": [(0, [1, 2]), (7, [2, np.nan])]},
            ValueError,
            r"\[1\] is nan, .*datasets\[1\] from draw 7 on must",
        ),
        (two, {"weights": [(0, [1, 2]), (7, [0, 0])]}, ValueError, "0 for every dataset from draw 7 on"),
        (
            two,
            {"weights": [(0, [1, 0]), (7, [2, 0])]},
            ValueError,
            r"datasets\[1\] has weight 0 at every draw.*leave it out",
        ),
        (
            two,
            {"weights": [(0, [1, 2]), (7, [1, 1e-12])]},
            ValueError,
            r"weights\[1\]\[1\]\[1\] is 1e-12, .*1e-09 of the largest",
        ),
        (
            two,
            {"weights": lambda draw: [1, 2 - draw]},
            ValueError,
            r"weights\(3\)\[1\] is -1.0, .*datasets\[1\] from draw 3 on",
        ),
        (two, {"weights": lambda draw: [draw]}, ValueError, r"weights\(0\) has 1 weights"),
        (two, {"weights": lambda draw: draw}, TypeError, r"weights\(0\) must be numbers, one per dataset, and is 0"),
        (
            two,
            {"weights": lambda draw: [1, 1 / (2 - draw)]},
            ValueError,
            r"weights\(2\) raised ZeroDivisionError.*division by zero.*from 0 to 3; let",
        ),
        (
            two,
            {"weights": lambda draw: [1, float(draw < 9000)] * (1 + (draw > 1e6)), "padding_mode": "cycle"},
            ValueError,
            r"weights\(1003520\) has 4 weights",
        ),
        (
            two,
            {"weights": [(0, [1, 1]), (2, [0, 1])], "exhausted": "repeat"},
            ValueError,
            r"datasets\[0\] has weight 0 from draw 2 on, .* an epoch with exhausted=\"repeat\" would not end; give it",
        ),
        (two, {"weights_by": "batches"}, ValueError, "weights_by is 'batches', and must be one of 'sources', 'steps'"),
        (
            lambda: [plain(lengths=[3, 4]), plain()],
            {"weights_by": "steps"},
            ValueError,
            r"weights_by=\"steps\" needs lengths, and datasets\[1\] has none; pass lengths=",
        ),
        (
            lambda: [plain([0, 0], lengths=[0, 0]), plain(lengths=[3, 4])],
            {"weights_by": "steps"},
            ValueError,
            r"the sources of datasets\[0\] have no items",
        ),
        (two, {"exhausted": "stop"}, ValueError, "exhausted"),
        (two, {"lanes": 3}, TypeError, "no option 'lanes'; batch_size="),
        (lambda: [plain([1])], {"padding_mode": "drop"}, ValueError, "lanes idle"),
    ],
)
def test_bad_options_say_what_is_wrong(datasets, options, error, reason):
    with pytest.raises(error, match=reason):
        interleave(datasets(), **options)


def test_repeated_sources_can_fill_more_lanes_than_there_are_sources():
    dataset = interleave([plain([1] * 4), plain([1])], exhausted="repeat", batch_size=8, padding_mode="drop")
    assert [batch.source_index[0].tolist() for batch in StreamDataLoader(dataset)] == [[0, 4, 1, 4, 2, 4, 3, 4]]


# Bad streams


def test_errors_name_the_source_and_on_error_skips_it():
    def broken(n):
        yield 0
        raise OSError("broken")

    def loader(**options):
        return StreamDataLoader(interleave([plain([5, 6]), plain([7], broken)], **options))

    with pytest.raises(errors.ReadError) as caught:
        list(loader())
    assert (caught.value.source_index, caught.value.source, caught.value.position) == (2, "7", 1)
    skipping = loader(on_error="skip")
    with pytest.warns(RuntimeWarning, match="source 2"):
        assert sum(int(batch.mask.sum()) for batch in skipping) == 12
    assert [failure.source_index for failure in skipping.failures] == [2]
