"""Several processes, each a rank with a loader of its own, share an epoch.

`place` finds which rank this is; `store`, `meeting` and `rendezvous` let ranks speak with each other; `agreement`
decides which steps belong to the epoch on all of them. It imports `dataset`, `_reading` and what lies below. Open
`ranks` first.
"""
