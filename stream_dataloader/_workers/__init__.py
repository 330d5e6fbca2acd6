"""Where parts come from: the main process's side of workers. It starts them and receives their parts.

`settings` is what they are started with. `pool` starts torch's workers, `mailbox` says what they are to read, `worker`
is what runs in them, and `worker_steps` with how many threads. `processes` looks after their lives, `pace` decides how
many steps a message carries, and `torch_quirks` holds what depends on torch's texts. `feed` receives parts. Of workers
that are threads, `threads` starts them, `exchange` holds their parts, and `thread_feed` receives them. `memory` is what
batches are put together in, `tally` counts. It imports `dataset`, `_reading` and what lies below. Open `pool` first.
"""
