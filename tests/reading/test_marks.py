"""Streams that say where sequences begin in them; random cases of promises, states and sections have them too."""

import pytest
from cases import Counting, Marked, is_marked

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ItemError, ReadError
from stream_dataloader.protocols import MarksStarts


class Broken(Marked):
    """It breaks at an item the first time; who is opened again is not asked about those before."""

    broken = False

    def starts_within(self, start, stop):
        assert (start >= 4) == (self.read > 4)
        return super().starts_within(start, stop)

    def __next__(self):
        if self.read == 4 and not Broken.broken:
            Broken.broken = True
            raise OSError("gone")
        return super().__next__()


def test_a_stream_that_was_opened_again_keeps_its_marks():
    dataset = StreamDataset([(0, 9)], lambda s: Broken(0, Counting()(s)), 1, time_steps=9, retries=1)
    Broken.broken = False
    (batch,) = StreamDataLoader(dataset)
    assert Broken.broken
    assert batch.is_first[:, 0].tolist() == [is_marked(0, n) for n in range(9)]


class Wrong(list):
    """Items that are no marks."""

    def starts_within(self, start, stop):
        return self[0]


@pytest.mark.parametrize(("wrong", "error"), [([7], ItemError), ([-1], ItemError), ([0.5], ReadError), (3, ReadError)])
def test_what_is_no_mark_is_an_error(wrong, error):
    assert isinstance(Wrong(), MarksStarts)
    dataset = StreamDataset([wrong], lambda marks: Wrong([marks] * 5), 1, time_steps=3)
    with pytest.raises(error, match="starts_within"):
        list(StreamDataLoader(dataset))
