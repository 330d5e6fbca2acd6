"""The main process's side of workers: it starts them, receives their parts and survives their deaths.

`pool` starts torch's workers, `mailbox` says what they are to read, `worker` is what runs in them, and `worker_steps`
with how many threads. `processes` looks after their lives, `pace` decides how many steps a message carries, and
`torch_quirks` holds what depends on torch's texts. `feed` receives parts, `iteration` makes batches of them, `rescue`
goes on after a death. Of workers that are threads, `threads` starts them, `exchange` holds their parts, and
`thread_feed` receives them. `memory` is what batches are put together in. `starter` starts an iteration. It imports
`_device`, `_loader` and what lies below. Open `iteration` first, then `pool`.
"""
