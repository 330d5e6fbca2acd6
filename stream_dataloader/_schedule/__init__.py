"""Who reads what and when, and where an epoch stands: pure functions and one ledger, no process, clock or torch.

`rules` has what every other module shares: lanes, options as numbers, and the decision about a ticket. `order` says
which source the n-th grant gets (with `mix` and `groups`), `ledger` decides tickets of several readers in order,
`reservations` is one lane's tickets ahead, `replay` says which item each cell of an epoch of known lengths holds, and
`step_count` counts its steps, also those left. `snapshot` is where an epoch stands between two steps, `progress`
follows it as batches are delivered, and `saved_state` makes plain data of it. It imports nothing of the package but
`protocols`, `stream_info`, `errors` and `_memory`. Open `rules` first, then `ledger`.
"""
