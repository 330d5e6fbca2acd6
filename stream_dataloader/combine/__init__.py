"""Datasets that are read together: `side_by_side` builds a loader for each, and joins their batches.

`side_by_side` checks the arguments, `loader` holds the loader that it returns, `dataset` decides when an epoch ends.
`reading` asks each loader for its next batch, `join` puts them side by side, `position` makes one state of theirs. Open
`loader` first.
"""
