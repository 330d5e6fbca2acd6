"""Ranks: several processes, each with a loader of its own, share an epoch.

`rendezvous` lets ranks begin an epoch together, `agreement` decides its steps.
This room imports `dataset`, `reading` and the rooms below. Open `ranks` first.
"""
