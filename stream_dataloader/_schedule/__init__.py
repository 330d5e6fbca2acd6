"""Who reads what and when, and where an epoch stands: pure functions and one ledger, no process, clock or torch.

`rules` has what every other module shares: lanes, options as numbers, and the decision about a ticket. `order` says
which source the n-th grant gets (with `mix` and `sections`), `tickets` decides those of several readers in order, and
has the rule by which a lane takes them. `replay` says which item each cell of an epoch of known lengths holds, and
counts its steps. `snapshot` is where an epoch stands between two steps, and follows it as batches are delivered;
`saved_state` makes plain data of it, and `position` says which epoch comes next. It imports nothing of the package but
`protocols`, `stream_info`, `errors` and `_memory`. Open `rules` first, then `tickets`.
"""
