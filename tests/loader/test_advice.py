"""Advice: made-up bottlenecks each get the sentence that helps, and what it says a change brings is so."""

import dataclasses

import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, visualize
from stream_dataloader._engine.advice import Setup
from stream_dataloader.stats import LoaderStats, WorkerStats


def test_the_padding_of_the_whole_epoch_may_be_known_better():
    loader = StreamDataLoader(StreamDataset([9] * 3, range, 3, time_steps=3))
    list(loader)
    assert loader.stats().advice().kind != "sections"
    assert loader.stats().advice(padding_share=0.8).kind == "sections"


def test_the_padding_that_is_forecast_is_that_of_all_lanes_of_virtual_ranks():
    lengths = [60, *[3] * 9]
    loader = StreamDataLoader(StreamDataset(lengths, range, 4, time_steps=3, lengths=lengths), virtual_ranks=2)
    list(loader)
    stats = loader.stats()
    assert stats.setup.forecast.padding_share == pytest.approx(stats.padding_share)


LENGTHS = {
    "one long": [800, *[8] * 20],
    "short": [3] * 200,
    "few": [60] * 3,
    "mixed": [1 + 37 * n % 100 for n in range(30)],
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_what_a_change_is_said_to_bring_is_what_epochs_have_on_average(lengths, shuffle):
    def padding_of(batch_size=4, **more):
        options = {"time_steps": 8, "lengths": lengths, "seed": 3, "shuffle": shuffle} | more
        dataset = StreamDataset(lengths, lambda n, start=0: range(start, n), batch_size, **options)
        loader, shares, items, cells = StreamDataLoader(dataset), [], 0, 0
        for _ in range(8 if shuffle else 1):
            masks = [batch.mask for batch in loader]
            shares.append(loader.stats().padding_share)
            items, cells = items + sum(int(mask.sum()) for mask in masks), cells + sum(map(torch.numel, masks))
        return 1 - items / cells, loader, visualize.timeline(dataset), shares

    now, loader, timeline, shares = padding_of()
    if shares[-1] > 0.2:
        assert loader.stats().advice().kind == timeline.alternatives[0].kind
    assert timeline.alternatives
    for one in timeline.alternatives:
        after, _, _, others = padding_of(**eval(f"dict({one.option})"))
        assert after == pytest.approx(one.padding_share), f"{one}, and epochs had {others}"
        assert after < now


@pytest.mark.parametrize("schedule", [None, "balanced", "longest_first"])
def test_with_few_shuffled_streams_a_lane_longest_first_is_named(schedule):
    lengths = [100 + 47 * n % 400 for n in range(12)]
    options = {"time_steps": 8, "lengths": lengths, "shuffle": True, "seed": 0, "schedule": schedule}
    loader = StreamDataLoader(StreamDataset(lengths, range, 5, **options))
    list(loader)
    text = loader.stats().advice(padding_share=0.5).text
    assert ("longest_first" in text) == (schedule != "longest_first"), text
    if schedule == "balanced":
        assert text.count("balanced") == 0, "it is what the dataset has"


@pytest.mark.parametrize("more", [{"lengths": None}, *({"padding_mode": mode} for mode in ("data", "drop", "cycle"))])
def test_what_lengths_do_not_tell_is_not_said(more):
    options = {"lengths": [9, 1, 1], "time_steps": 4} | more
    dataset = StreamDataset([9, 1, 1], range, 2, **options)
    assert visualize.timeline(dataset, batches=3).alternatives == ()


def test_without_figures_there_is_no_advice():
    assert LoaderStats().advice().kind == "unknown"
    assert "read more" in str(StreamDataLoader(StreamDataset([1], range, 1, time_steps=1)).stats().advice())


def worker(reading, opening, waiting, idle, ahead=0, sent=0):
    return WorkerStats(
        reading_seconds=reading,
        opening_seconds=opening,
        waiting_seconds=waiting,
        idle_seconds=idle,
        opening_ahead_seconds=ahead,
        sent=sent,
    )


FIGURES = LoaderStats(
    setup=Setup(lanes=4, time_steps=4, packed=False, sources=9, num_workers=2, prefetch_factor=2),
    seconds=1,
    batches=100,
    begun=9,
    items=1600,
    cells=1600,
    bytes=10**9,
    wait_seconds=0.5,
    workers=(worker(5, 0, 0, 5),) * 2,
)
FOUR_WORKERS = dataclasses.replace(FIGURES.setup, num_workers=4)


def alone(**changed):
    return dataclasses.replace(FIGURES.setup, num_workers=0, **changed)


@pytest.mark.parametrize(
    ("changed", "cores", "kind"),
    [
        ({"setup": alone()}, 2, "workers"),
        ({"setup": alone(lanes=16), "cells": 3200}, 2, "fewer lanes"),
        ({"setup": alone(), "cells": 3200}, 2, "sections"),
        ({"setup": alone(), "cells": 3200, "begun": 1000}, 2, "packed windows"),
        ({"setup": alone(packed=True), "cells": 3200, "begun": 1000}, 2, "sections"),
        ({"bytes": 10_000, "workers": (worker(0.01, 0, 0, 1),) * 2}, 2, "larger windows"),
        ({}, 2, "prefetch"),
        ({"workers": (worker(5, 0, 0, 5, sent=75),) * 2}, 2, "arrays"),
        ({"workers": (worker(3, 0, 5, 2),) * 2}, 2, "lookahead"),
        ({"workers": (worker(9.8, 0, 0, 0.2), worker(0.5, 0, 9, 0.5))}, 2, "lookahead"),  # one has a slow stream
        ({"workers": (worker(9, 0, 0, 1),) * 2}, 2, "pack"),
        ({"workers": (worker(9, 0, 0, 1),) * 2}, 16, "workers"),
        ({"workers": (worker(9, 0, 0, 1),) * 4, "setup": FOUR_WORKERS}, 16, "more lanes"),
        ({"workers": (worker(0.9, 0, 0, 0.1),) * 2}, 2, "smaller items"),
        ({"workers": (worker(2, 7, 0, 1, 3),) * 2}, 2, "open ahead"),
        ({"cells": 3200, "late_cells": 1500}, 2, "late streams"),
        ({"cells": 3200, "late_cells": 300}, 2, "sections"),
        ({"cells": 2050, "late_cells": 380}, 2, "prefetch"),  # little of each, and much only together
        ({"wait_seconds": 0.05}, 2, "nothing"),
        ({"batches": 1}, 2, "unknown"),
    ],
)
def test_what_slows_a_run_gets_the_advice_that_helps(changed, cores, kind):
    assert dataclasses.replace(FIGURES, **changed).advice(cores=cores).kind == kind
