"""Several processes, each a rank with a loader of its own, share an epoch.

`rendezvous` has ranks begin an epoch together, `agreement` decides its steps.
It imports `dataset`, `_reading` and what lies below. Open `ranks` first.
"""
