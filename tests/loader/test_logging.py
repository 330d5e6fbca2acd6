"""What is logged, under the name `stream_dataloader`, and at which level."""

import logging
import time

import pytest
from helpers import declared

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.reading import opener


def read(number):
    yield from range(3)
    if number == 1:
        raise ValueError("torn")


def told(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "stream_dataloader"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_skip_is_a_warning(workers, caplog):
    with pytest.warns(RuntimeWarning, match="skipped"):
        list(StreamDataLoader(StreamDataset([0, 1, 2], read, 2, time_steps=2, on_error="skip"), workers))
    ((level, text),) = told(caplog)
    assert level == "WARNING"
    assert "source 1 (1), item 3, lane 1" in text


def test_without_handlers_a_skip_is_told_once(programs):
    code = (
        "from stream_dataloader import StreamDataLoader as L, StreamDataset as D\n"
        "list(L(D(['a'], lambda name: 1 / 0, 1, time_steps=1, on_error='skip')))"
    )
    done = programs(code)
    assert done.returncode == 0
    assert done.stderr.count("skipped the rest of a stream") == 1


def test_the_first_slow_open_is_a_warning_but_none_in_the_background(caplog, monkeypatch):
    monkeypatch.setattr(opener, "_SLOW_SECONDS", 0.02)
    caplog.set_level(logging.INFO, "stream_dataloader")

    def open_slowly(number):
        time.sleep(0.03)
        for i in range(number):
            time.sleep(0.02 if i else 0)
            yield i

    list(StreamDataLoader(StreamDataset([2, 3], open_slowly, 1, time_steps=2)))
    (first, text), (second, _) = told(caplog)
    assert (first, second) == ("WARNING", "INFO")
    assert text.startswith("opening source 0 (2) took 0.")
    assert text.endswith("s, lane 0, worker 0")

    list(StreamDataLoader(StreamDataset([6] * 8, declared(open_slowly), 2, time_steps=2), 1, worker_method="thread"))
    assert ("INFO", True) in [(level, "in the background" in text) for level, text in told(caplog)]
