"""Several processes, each a rank with a loader of its own, share an epoch.

`rendezvous` has ranks begin an epoch together, `agreement` decides which steps it has on all of them. Open `ranks` first.
"""
