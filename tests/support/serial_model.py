"""The loader's meaning in one place: no process, thread, request or tensor."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Serial:
    """What is read, and where it stands.

    `read(draw)` has the cells of what is handed out as that one, (source, position, ...); `total` are handed out in a
    pass, a lane gives up after `most` without an item, and those below `new` are read as something new.
    """

    read: Any
    total: int
    lanes: int
    time_steps: int
    windows: str
    mode: str
    lookahead: int
    most: int | None = None
    new: int | None = None
    cursor: int = 0
    reading: list = field(default_factory=list)  # cells that are left of each lane's stream

    def __post_init__(self):
        self.most, self.new = (self.total if number is None else number for number in (self.most, self.new))
        self.reading += [[] for _ in range(self.lanes - len(self.reading))]
        self.held, self.empties = [None] * self.lanes, [0] * self.lanes
        self.idle = [False] * self.lanes

    def draw(self, ahead):
        left = self.total - self.cursor if self.mode != "cycle" else float("inf")
        refused = left <= 2 * self.lanes if ahead else left <= 0 and self.mode != "data"
        self.cursor += not refused
        return None if refused else self.cursor - 1

    def cells(self, draw):
        fresh = draw < self.new or self.mode == "cycle"
        return [(source, position, fresh, *rest) for source, position, *rest in self.read(draw)]

    def next_stream(self, lane):
        held = self.held
        if held[lane] is None:
            held[lane] = [self.draw(ahead=True) for _ in range(self.lookahead)]
        draw = held[lane].pop(0) if held[lane] else None
        held[lane] = [] if draw is None else [*held[lane], self.draw(ahead=True)]
        if draw is None and not (self.mode == "data" and self.empties[lane] >= self.most):
            draw = self.draw(ahead=False)
        self.idle[lane] = draw is None
        if draw is not None:
            self.reading[lane] = self.cells(draw)
            self.empties[lane] = 0 if self.reading[lane] else self.empties[lane] + 1

    def batches(self):
        """Yield each batch: for each lane its cells, (source, position, fresh, ...), or None."""
        reading, idle, packed = self.reading, self.idle, self.windows == "packed"
        while True:
            batch = [[] for _ in range(self.lanes)]
            for lane, window in enumerate(batch):
                while len(window) < self.time_steps and not idle[lane] and (reading[lane] or not window or packed):
                    if reading[lane]:
                        window.append(reading[lane].pop(0))
                    else:
                        self.next_stream(lane)
                window.extend([None] * (self.time_steps - len(window)))
            nothing_new = not any(cell and cell[2] for window in batch for cell in window)
            if nothing_new or (self.mode == "drop" and [None] in [window[:1] for window in batch]):
                return
            yield batch


def changed(model, last, lanes, time_steps, read=None, total=None):
    """What a model becomes behind its batch `last` with other lanes and windows; `read`, `total`: of a longer list."""
    read, total = read or model.read, total or model.total
    cursor = min(model.cursor, model.total) if model.mode == "data" else model.cursor
    is_new = model.mode == "cycle"
    line = []
    for own, window in list(zip(model.reading, last, strict=True))[lanes:]:
        if window[-1] is not None and (is_new or window[-1][2]):  # open, maybe at its end
            cells = [(source, position, *rest) for source, position, _, *rest in own]
            line.append([(*cells[0][:2], True, *cells[0][3:]), *cells[1:]] if cells else [])
    held = sorted(draw for own in model.held for draw in own or () if draw is not None)
    line += [list(model.read(draw)) for draw in held if is_new or draw < model.new]
    begin = len(line)

    def rest(draw):
        return line[draw] if draw < begin else read(cursor + draw - begin)

    left = begin + total - cursor
    how = model.windows, model.mode, model.lookahead, total, max(begin, left)
    made = Serial(
        rest, left, lanes, time_steps, *how, reading=[own if own and own[0][2] else [] for own in model.reading[:lanes]]
    )
    made.empties = [-begin] * lanes
    return made
