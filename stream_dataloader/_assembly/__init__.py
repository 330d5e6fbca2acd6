"""Windows become one batch.

A `part` is what a worker sends of one step. `block` and `slots` are the memory that windows are written to (in this
process, or shared and page-locked by `page_lock`), `writer` is a worker's side of that, and `regroup` the main
process's. It imports `_items`, `batch` and what lies below. Open `part` first, then `writer`.
"""
