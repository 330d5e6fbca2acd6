"""Where parts come from: the main process's side of workers. It starts them and receives their parts.

`feed` has what all workers have in common. `pool` starts torch's and receives their parts, `mailbox` says what they are
to read, `worker` is what runs in them, and `worker_steps` with how many threads. `processes` looks after their lives,
`pace` decides how many steps a message carries, `packets` carries it, and `torch_quirks` holds what depends
on torch's texts. Of workers that are threads, `threads` does what `pool` does, and `exchange` holds their parts.
`settings` is what workers are started with, `memory` what batches are put together in, and `tally` counts. It imports
`dataset`, `_reading` and what lies below. Open `feed` first, then `pool`.
"""
