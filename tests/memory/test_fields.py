"""Named fields over one block of memory."""

import numpy as np
import pytest

from stream_dataloader._memory.fields import Carver, bytes_of


def lay_out(carve):
    """Fields of several shapes and dtypes; each takes whole words."""
    return [carve(3), carve(2, 5, dtype=np.float64), carve(3, dtype=np.bool_), carve(0), carve()]


def test_fields_lie_one_behind_the_other_as_asked_for_and_are_zero():
    assert bytes_of(lay_out) == 24 + 80 + 8 + 8
    block = np.zeros(15, np.int64)
    fields, again = lay_out(Carver(block)), lay_out(Carver(block))
    assert [field.shape for field in fields] == [(3,), (2, 5), (3,), (0,), ()]
    assert [field.dtype for field in fields] == [np.int64, np.float64, np.bool_, np.int64, np.int64]
    assert not any(field.any() for field in [*fields, *lay_out(Carver())])
    for number, field in enumerate(fields, start=1):
        field[...] = number
    assert [set(field.ravel().tolist()) for field in again] == [{1}, {2.0}, {True}, set(), {5}]
    with pytest.raises((TypeError, ValueError), match="buffer"):
        lay_out(Carver(block[1:]))
