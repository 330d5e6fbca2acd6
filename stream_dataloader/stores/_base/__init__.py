"""Base of all stores.

`store` is the factory that knows its streams, and `stream` reads one of them. `handles` shares
open files. `leaves` describes the layout of items, for formats that `packing` writes.
It imports `errors`, `_engine/items` and `streams`. Open `store` first.
"""
