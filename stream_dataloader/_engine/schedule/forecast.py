"""The share of padding in an epoch's batches, with the options as they are and with others.

Guarantee: computed from the sources' lengths alone, by the code that assigns sources to lanes; nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from stream_dataloader._engine.schedule.mix import Schedule
from stream_dataloader._engine.schedule.replay import count_steps, steps_of_groups
from stream_dataloader._engine.schedule.rules import IntArray, Rules
from stream_dataloader._engine.schedule.sections import Cut, Cuts, Lengths, lengths_in

_MOST_STREAMS = 10_000  # assigned for one figure, which takes about 50 ms
_MOST_EPOCHS = 8
_ABOUT_THE_SAME = 0.02


class Alternative(NamedTuple):
    """An option, and the share of padding that batches would have with it.

    Attributes:
        kind: The `Advice.kind`.
        option: As Python code.
        padding_share: 0 to 1; the mean of eight epochs where they differ, of fewer if there are very many streams.
    """

    kind: str
    option: str
    padding_share: float

    def __str__(self) -> str:
        return f"{self.padding_share:.0%} with {self.option}"


@dataclass(frozen=True)
class Forecast:
    """Forecast of an epoch's padding.

    Attributes:
        lengths: `(sources,)`, items of each source.
        scheduled: Items of each unit that lanes take: of sources, or of sections.
    """

    rules: Rules
    lengths: IntArray
    scheduled: Lengths
    epoch: int = 0

    @classmethod
    def of(cls, rules: Rules, lengths: IntArray | None, scheduled: Lengths | None, epoch: int = 0) -> Forecast | None:
        """Create the forecast; None where it cannot be computed, or not fast."""
        if lengths is None or scheduled is None or rules.time_steps is None or rules.mix is not None:
            return None
        # The other modes read sources again, or end at the first idle lane. A very long list takes seconds to assign.
        if rules.padding_mode != "zeros" or len(scheduled) > _MOST_STREAMS or (lengths < 0).any():
            return None
        return cls(rules, lengths, scheduled, epoch)

    @cached_property
    def padding_share(self) -> float:
        """Share of padding in the epoch's batches, 0 to 1."""
        return self._padding_share(self.rules, self.scheduled)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """Options that would leave less padding, the best first."""
        now = self._usual_share(self.rules, self.scheduled)
        found = [one for one in self._alternatives() if one.padding_share < now - _ABOUT_THE_SAME]
        best = min((one.padding_share for one in found), default=0.0)
        return sorted(found, key=lambda one: max(one.padding_share, best + _ABOUT_THE_SAME))

    def _alternatives(self) -> Iterator[Alternative]:
        rules, sources = self.rules, len(self.lengths)
        if 0 < sources < rules.lanes and rules.groups.total == 1:
            yield self._with("fewer lanes", f"batch_size={sources}", replace(rules, lanes=sources))
        # A random order comes first: of options that leave about as much padding, the first is recommended.
        schedules: tuple[Schedule, ...] = ("balanced", "longest_first") if rules.shuffle else ("longest_first",)
        for schedule in schedules[schedules.index(rules.schedule) + 1 if rules.schedule else 0 :]:
            changed = replace(rules, schedule=schedule, lookahead=0)  # by default a schedule reserves nothing
            yield self._with("schedule", f'schedule="{schedule}"', changed)
        if not isinstance(self.scheduled, Cuts) or not self.scheduled.skips(0):
            yield from self._longest_sections()
        if rules.windows == "aligned":
            yield self._with("packed windows", 'windows="packed"', replace(rules, windows="packed"))

    def _longest_sections(self) -> Iterator[Alternative]:
        """Yield the longest sections that leave about as little padding as any."""
        window = self.rules.time_steps or 1
        steps, found = window, []
        while steps < max(self.lengths, default=0):
            cuts = Cuts([Cut(self.lengths, steps, jitter=self.rules.shuffle)], self.rules.seed)
            if len(cuts) <= _MOST_STREAMS:
                rules = replace(self.rules, num_sources=len(cuts))
                found.append(self._with("sections", f"sections={steps}", rules, cuts))
            steps *= 2
        best = min((one.padding_share for one in found), default=0.0)
        yield from [one for one in found if one.padding_share <= best + _ABOUT_THE_SAME][-1:]

    def _with(self, kind: str, option: str, rules: Rules, scheduled: Lengths | None = None) -> Alternative:
        share = self._usual_share(rules, self.scheduled if scheduled is None else scheduled)
        return Alternative(kind, option, share)

    def _usual_share(self, rules: Rules, scheduled: Lengths) -> float:
        """Return the mean share of several epochs if they differ: a single one may be far from typical."""
        differ = rules.shuffle or isinstance(scheduled, Cuts)
        most = max(1, _MOST_STREAMS // max(1, len(scheduled)))
        return self._padding_share(rules, scheduled, min(_MOST_EPOCHS, most) if differ else 1)

    def _padding_share(self, rules: Rules, scheduled: Lengths, epochs: int = 1) -> float:
        cells = items = 0
        for epoch in range(self.epoch, self.epoch + epochs):
            steps = count_steps(rules, steps_of_groups(rules, epoch, scheduled))
            cells += steps * (rules.time_steps or 1) * rules.lanes_of_a_group * rules.groups.total
            known = lengths_in(scheduled, epoch)
            assert known is not None
            items += int(known.sum())
        return 1 - items / cells if cells else 0.0
