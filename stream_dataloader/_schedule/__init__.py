"""Who reads what and when: pure functions and one ledger, without processes, clocks or torch.

`rules` has what every other module shares: lanes, options as numbers, and the decision about a ticket. `order` says
which source the n-th grant gets (with `mix`, `groups` and `permutation`), `ledger` decides tickets in order,
`reservations` is one lane's tickets ahead, `step_count` counts the steps of an epoch of known lengths, and `replay`
says which item each of its cells holds. It imports nothing of the package but `protocols`, `stream_info`, `errors` and
`_memory`. Open `rules` first, then `ledger`.
"""
