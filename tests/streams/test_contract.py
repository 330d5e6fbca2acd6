"""The contract that streams are run through finds what is wrong with one, and passes what is right."""

import itertools
import types

import numpy as np
import pytest

from stream_dataloader.testing import StreamContract

opened = itertools.count()


class Counting:
    """Counts up to its source; goes wrong in the way it is told to."""

    def __init__(self, wrong=""):
        self.wrong = wrong

    def __call__(self, source, *, start=0):
        return Numbers(source, start + (self.wrong == "start" and start > 0), self)

    def length(self, source):
        return source + (self.wrong == "length")


class Numbers:
    shared = [0]  # noqa: RUF012

    def __init__(self, stop, position, factory):
        self.position, self.stop, self.wrong = position, stop, factory.wrong
        self.again = next(opened)
        self.file = open("/dev/null") if self.wrong == "closed" else None  # noqa: SIM115
        self.kept = self.file and factory.__dict__.setdefault("files", []).append(self.file)
        if self.wrong == "shared":
            self.shared[0] = position

    def __iter__(self):
        while self.position < self.stop:
            if self.wrong == "shared":
                self.position = self.shared[0]
                self.shared[0] += 1
                if self.position >= self.stop:
                    return
            self.position += 1
            if self.wrong == "alike" and self.position == 3:
                yield np.zeros(2)
            yield np.array([self.position + (self.wrong == "again") * self.again])

    def read_into(self, out):
        count = min(len(out), self.stop - self.position)
        out[:count, 0] = np.arange(self.position + 1, self.position + count + 1) + (self.wrong == "again") * self.again
        if self.wrong == "written":
            out[: count + 1] += 1
        self.position += count
        return count

    def starts_within(self, start, stop):
        if self.wrong == "marks":
            return [start]  # wherever it is asked
        return [n for n in range(start, stop) if n % 4 == 0]


class TestContract(StreamContract):
    @pytest.fixture
    def open_stream(self):
        return Counting()

    @pytest.fixture
    def sources(self):
        return [5, 0, 12, 1]


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ("again", "the_same_twice"),
        ("again", "is_picklable"),
        ("alike", "items_are_alike"),
        ("start", "starts_at_any_item"),
        ("length", "length_is_right"),
        ("written", "writes_what_it_yields"),
        ("marks", "marks_starts"),
        ("shared", "two_at_once"),
        ("closed", "closes"),
    ],
)
def test_what_is_wrong_is_found(wrong, test, monkeypatch):
    no_wait = types.SimpleNamespace(monotonic=itertools.count().__next__, sleep=int)
    monkeypatch.setattr("stream_dataloader.testing.streams.time", no_wait)
    factory = Counting(wrong)
    with pytest.raises(AssertionError):
        getattr(StreamContract(), f"test_{test}")(factory, [5, 12])
    for file in vars(factory).get("files", ()):
        file.close()
