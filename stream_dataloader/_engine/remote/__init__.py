"""Workers on other machines: tasks of a Ray cluster, which run the same loop as processes.

`pool` starts the tasks, `worker` is one. Parts travel by TCP: `mail` is the loader's end, `frames` and `messages` are
what a connection carries. Without known lengths, `ledger` decides which lane gets which source. This room imports
`workers` and the rooms below. Open `pool` first, then `worker`.
"""
