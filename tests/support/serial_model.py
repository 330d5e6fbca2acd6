"""The loader's meaning in one place: no process, thread, ticket or tensor."""


def serial_batches(read, total, lanes, time_steps, windows, mode, lookahead):
    """Yield each batch: for each lane its cells, (source, position, fresh, ...), or None.

    `read(grant)` has the cells of what is handed out as that one, but for `fresh`; `total` are handed out in a pass.
    """
    cursor = 0
    reading, held, idle, empties = [[] for _ in range(lanes)], [None] * lanes, [False] * lanes, [0] * lanes

    def draw(ahead):
        nonlocal cursor
        left = total - cursor if mode != "cycle" else float("inf")
        refused = left <= 2 * lanes if ahead else left <= 0 and mode != "data"
        cursor += not refused
        return None if refused else cursor - 1

    def next_stream(lane, taken):
        most = max(lookahead, min(taken, time_steps, 16) if lookahead and windows == "packed" else 0)
        if held[lane] is None:
            held[lane] = [draw(ahead=True) for _ in range(lookahead)]
        grant = held[lane].pop(0) if held[lane] else None
        held[lane] = [] if grant is None else held[lane] + [draw(ahead=True) for _ in range(most - len(held[lane]))]
        if grant is None and not (mode == "data" and empties[lane] >= total):
            grant = draw(ahead=False)
        idle[lane] = grant is None
        if not idle[lane]:
            fresh = grant < total or mode == "cycle"
            reading[lane] = [(source, position, fresh, *rest) for source, position, *rest in read(grant)]
            empties[lane] = 0 if reading[lane] else empties[lane] + 1

    while True:
        batch = [[] for _ in range(lanes)]
        for lane, window in enumerate(batch):
            taken = 0
            while len(window) < time_steps and not idle[lane] and (reading[lane] or not window or windows == "packed"):
                if reading[lane]:
                    window.append(reading[lane].pop(0))
                else:
                    taken += 1
                    next_stream(lane, taken)
            window.extend([None] * (time_steps - len(window)))
        if not any(c and c[2] for w in batch for c in w) or (mode == "drop" and [None] in [w[:1] for w in batch]):
            return
        yield batch
