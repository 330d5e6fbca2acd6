"""`benchmarks/together.py`: what runs beside the program makes it fail; `gpu.py` where there is no device.

The cases of `benchmarks/reliability.py`, of which a quick run draws a few.
"""

import importlib
import multiprocessing
import os
import random
import sys
import threading
import time

import pytest
import torch
from helpers import FOREVER, PATIENCE, ROOT

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def together(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("together")


def test_threads_and_processes_return_in_order_and_one_that_raises_frees_the_others(together):
    ended, barrier = threading.Event(), threading.Barrier(3)
    tasks = [lambda: ended.wait(PATIENCE), lambda: ended.set() or 1, lambda: 2]
    assert together.in_threads(tasks) == [True, 1, 2]
    assert together.in_processes(FORK, pow, [(2, 3), (3, 2), (5, 1)]) == [8, 9, 5]
    with pytest.raises(ZeroDivisionError):
        together.in_threads([barrier.wait, lambda: 1 / 0, barrier.wait], barrier)


def sleeping_or(end, number):
    return time.sleep(FOREVER) if number else end(7)


@pytest.mark.parametrize("end", [len, os._exit])
def test_a_process_that_fails_ends_the_others(together, end):
    with pytest.raises(RuntimeError, match=r"has no len|ended with status 7"):
        together.in_processes(FORK, sleeping_or, [(end, 0), (end, 1)])
    assert not multiprocessing.active_children()


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA only")
@pytest.mark.usefixtures("together")
def test_without_a_device_the_benchmark_of_gpus_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick"])
    importlib.import_module("gpu").main()
    assert capsys.readouterr().out == "no CUDA device here: nothing is measured\n"


@pytest.mark.slow
@pytest.mark.usefixtures("together")
def test_the_benchmark_of_gpus_is_whole(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick", "--device", "cpu"])
    importlib.import_module("gpu").main()
    said = capsys.readouterr().out
    assert "All numbers arrived on cpu" in said
    assert all(text in said for text in ("loader, device= / bare copy", "with the loader / without", "two loaders /"))


@pytest.mark.filterwarnings("ignore:skipped the rest", "ignore:the epoch has no batch")
def test_loaders_of_all_random_cases_read_an_epoch(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cases = importlib.import_module("reliability_cases")
    drawn = [cases.Case.draw(random.Random(seed), ("zeros", "data", "drop", "cycle")) for seed in range(40)]
    assert {case.kind for case in drawn} == {*cases.STREAMS}
    assert sum(len(case.expected(0)[0]) > 1 for case in drawn) > 30
