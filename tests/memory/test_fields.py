"""Named fields over one block of memory."""

import numpy as np
import pytest

from stream_dataloader._memory.fields import Carver, bytes_of


class Fields:
    """Fields of several shapes and dtypes."""

    def __init__(self, carve):
        self.counts = carve(3)
        self.seconds = carve(2, 5, dtype=np.float64)
        self.flags = carve(3, dtype=np.bool_)
        self.last = carve()

    def all(self):
        return [self.counts, self.seconds, self.flags, self.last]


def memory(size_bytes):
    return np.zeros(size_bytes // 8, np.int64)


def test_fields_have_the_shapes_and_dtypes_asked_for():
    fields = Fields(Carver(memory(bytes_of(Fields))))
    assert [field.shape for field in fields.all()] == [(3,), (2, 5), (3,), ()]
    assert [field.dtype for field in fields.all()] == [np.int64, np.float64, np.bool_, np.int64]


def test_fields_lie_one_behind_the_other_and_do_not_overlap():
    block = memory(bytes_of(Fields))
    starts = [field.__array_interface__["data"][0] for field in Fields(Carver(block)).all()]
    begin = block.__array_interface__["data"][0]
    assert [start - begin for start in starts] == [0, 24, 104, 112], "three flags take a whole word"
    assert bytes_of(Fields) == 120


def test_what_is_written_to_one_field_is_in_no_other():
    fields = Fields(Carver(memory(bytes_of(Fields))))
    for number, field in enumerate(fields.all(), start=1):
        field[...] = number
    assert [set(field.ravel().tolist()) for field in fields.all()] == [{1}, {2.0}, {True}, {4}]


def test_two_carvers_over_one_block_see_the_same():
    block = memory(bytes_of(Fields))
    one, other = Fields(Carver(block)), Fields(Carver(block))
    one.seconds[1, 4] = 2.5
    assert other.seconds[1, 4] == 2.5


def test_without_memory_fields_are_counted_and_can_be_used():
    carver = Carver()
    fields = Fields(carver)
    assert carver.end_bytes == bytes_of(Fields)
    assert not any(field.any() for field in fields.all())
    fields.counts[:] = 1
    assert not fields.flags.any()


def test_a_block_that_is_too_small_is_an_error():
    with pytest.raises((TypeError, ValueError), match="buffer"):
        Fields(Carver(memory(bytes_of(Fields) - 8)))


@pytest.mark.parametrize(
    ("shape", "dtype", "size_bytes"), [((0,), np.int64, 0), ((1,), np.int8, 8), ((9,), np.int8, 16)]
)
def test_a_field_takes_whole_words(shape, dtype, size_bytes):
    assert bytes_of(lambda carve: carve(*shape, dtype=dtype)) == size_bytes
