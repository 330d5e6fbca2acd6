"""What all stores have in common.

`store` is the factory that knows its streams, `stream` reads one of them, `numbers` is a store's list of sources,
`formats` says what kind of store lies at a path, `packing` is what a format does to be packed in parallel, `files`
reads small files that may hold anything, `handles` shares open files, and `rows` makes steps of tables. It imports
`errors`, `_items`, and `streams` for sections of sources and rows of arrays. Open `store` first.
"""
