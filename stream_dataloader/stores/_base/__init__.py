"""What all stores have in common.

`store` is the factory that knows its streams, `stream` reads one of them. `handles` shares
open files. `leaves` says what items look like, for formats that `packing` writes.
It imports `errors`, `_items` and `streams`. Open `store` first.
"""
