"""What all stores have in common.

`store` is the factory that knows its streams, `stream` reads one of them, `numbers` is a store's list of sources,
`formats` says what kind of store lies at a path, `packing` is what a format does to be packed in parallel, `mapped`
reads flat files of steps, `handles` shares open files, `rows` makes steps of tables, `values` writes one step's value,
`pictures` decodes leaves that are images, `patterns` finds files by patterns, `files` reads small files that may hold
anything, `codecs` compresses, and `arrow` has pyarrow tell of damage. `packed`, made of `tables`, `leaves` and
`structure`, is for formats of our own: what is in a store, where its streams lie, and what their items look like. It
imports `errors`, `_items`, and `streams` for sections of sources, rows of arrays and names. Open `store` first.
"""
