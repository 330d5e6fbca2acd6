"""Where parts come from: the main process's side of workers. It starts them and receives their parts.

`serve` is the loop of a reader, in a process (`process`) or a thread (`threads`); `channel` is how it talks to the
loader. It imports `dataset`, `_reading` and what lies below. Open `serve` first, then `pool`.
"""
