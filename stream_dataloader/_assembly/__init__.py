"""Windows become one batch.

`layout` takes items apart, `block` and `slots` are the memory they are put into (in this process or in the shared
ring), `writer` is a worker's side of that and `regroup` the main process's. It imports `_memory`, `_schedule`,
`_state` and `batch`. Open `layout` first, then `writer`.
"""
