"""Several processes, each a rank with a loader of its own, share an epoch.

`place` finds which rank this is, `store` and `keys` exchange values between ranks, `speaker` does so for the main
thread. `rendezvous` has ranks begin an epoch together, and `agreement` decides which steps belong to the epoch on all
of them. It imports `dataset`, `_reading` and what lies below. Open `ranks` first.
"""
