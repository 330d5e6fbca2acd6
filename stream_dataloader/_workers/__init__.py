"""The main process's side of worker processes: it starts them, takes their parts in and survives their deaths.

`pool` starts torch's workers and tells them what to read, `feed` takes their parts in, `iteration` makes batches of
them, `rescue` goes on after a death. It imports `_ranks`, `dataset` and what lies below. Open `iteration` first, then
`pool`.
"""
