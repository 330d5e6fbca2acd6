"""Passes over a list of sources that may grow meanwhile: pure functions, no torch, clock or lock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """Passes over one list.

    ::

        size = 5, grown in pass 1, when it had 3        pass 0    pass 1        pass 2
        grown = ((1, 3),), joins=True                   0 1 2     0 1 2, 3 4    0 1 2 3 4
        grown = ((2, 3),), joins=False                  0 1 2     0 1 2         0 1 2 3 4

    Attributes:
        size: Number of sources, or of draws in a pass.
        grown: Each time that the list grew: the first pass that has the new sources, and the size before.
        joins: New sources come behind those that are left of a pass; False: they join at the next one.
    """

    size: int
    grown: tuple[tuple[int, int], ...] = ()
    joins: bool = False

    def find(self, count: int) -> tuple[int, int]:
        """Return the pass of a draw, by the number of earlier draws, and its index in that pass."""
        begin = 0
        for turn, size in self.grown:
            if count < (turn - begin) * size:
                passes, index = divmod(count, size)
                return begin + passes, index
            count, begin = count - (turn - begin) * size, turn
        passes, index = divmod(count, self.size)
        return begin + passes, index

    def sizes(self, turn: int) -> tuple[int, ...]:
        """Return the numbers of sources in a pass: at its beginning, and each time that it grew."""
        if not self.grown:
            return (self.size,)
        later = [size for begin, size in self.grown if begin > turn]
        own = [size for begin, size in self.grown if begin == turn] if self.joins else []
        return *own, later[0] if later else self.size

    def until_all(self) -> int:
        """Return the number of draws in which every source comes."""
        begin = drawn = 0
        for turn, size in self.grown:
            begin, drawn = turn, drawn + (turn - begin) * size
        return drawn + self.size

    def grow(self, count: int, size: int) -> Passes:
        """Return the passes of a list that has more sources after a number of draws."""
        if not count:  # as if it had had them from the beginning
            return Passes(size, joins=self.joins)
        turn = self.find(count - 1)[0] + (not self.joins)
        return Passes(size, (*self.grown, (turn, self.size)), self.joins)
