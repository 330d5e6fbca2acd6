"""Workers: the main process starts them and receives their parts.

`serve` is the loop of a reader, in a process (`process`) or a thread (`threads`); `channel` connects it to the loader.
This room imports `dataset`, `reading` and the rooms below. Open `serve` first, then `pool`.
"""
