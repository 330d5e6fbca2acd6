"""Where parts come from: the main process's side of workers. It starts them and receives their parts.

`feed` has what all workers have in common, and the memory that batches are put together in. `pool` starts torch's and
receives their parts, `mailbox` says what they are to read and how much a message carries, `worker` is what runs in
them. `processes` looks after their lives, `packets` carries messages, and `torch_quirks` holds what depends on torch's
texts. Of workers that are threads, `threads` does what `pool` does. `exchange` holds what several readers of one
process have read. `settings` is what workers are started with, and `tally` counts. It imports `dataset`, `_reading` and
what lies below. Open `feed` first, then `pool`.
"""
