"""A random order of very many sources, which takes no memory: each place is computed when it is asked for.

Guarantee: each source has one place, the same in every process, on every machine.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1
_ROUNDS = 8  # 4 are enough with ideal round functions (Luby and Rackoff); twice as many for a simple one


class Permutation:
    """A permutation of `range(size)` by a keyed Feistel network, which is applied again until the result is in range.

    Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions (1988); Black and Rogaway,
    Ciphers with arbitrary finite domains (2002), for sizes that are no power of 4. The round function is the finalizer
    of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
    """

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self._size = size
        # A place has two halves of equal width, so the network permutes the next power of 4: less than 4 times `size`,
        # and a place takes 4 walks at most on average.
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [int(key) for key in rng.integers(0, 2**64, _ROUNDS, np.uint64)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """Which one is at a place."""
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} is out of range for {self._size}")
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right + key) & mask)
            place = left << half | right
            if place < self._size:
                return place


def _mixed(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
