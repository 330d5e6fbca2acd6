"""Datasets that are read together: `side_by_side` has a loader for each, and joins their batches.

`side_by_side` checks what is given, `loader` is what it returns, `dataset` says when an epoch ends. `reading` asks each
loader for its next batch, `join` puts them side by side, `position` makes one state of theirs. Open `loader` first.
"""
