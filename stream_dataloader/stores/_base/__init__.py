"""What all stores have in common.

`store` is the factory that knows its streams, `stream` reads one of them, `formats` says what lies at a path.
`rows`, `mapped` and `pictures` make steps of tables, flat files and images; `handles` shares open files. `packed`,
of `tables`, `leaves` and `structure`, is for formats of our own, which `packing` writes. It imports `errors`, `_items`
and `streams`. Open `store` first.
"""
