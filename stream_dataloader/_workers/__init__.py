"""The main process's side of worker processes: it starts them, receives their parts and survives their deaths.

`pool` starts torch's workers and tells them what to read (`processes`, `pace`), `feed` receives their parts,
`iteration` makes batches of them, and `rescue` continues after a death. It imports `_ranks`, `dataset` and what lies
below. Open `iteration` first, then `pool`.
"""
