"""Where parts come from: the main process's side of workers. It starts them and receives their parts.

`pool` is for torch's processes, `threads` for threads. It imports `dataset`, `_reading` and what lies below. Open
`feed` first, then `pool`.
"""
