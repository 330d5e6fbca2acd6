"""Who reads what and when: pure functions and one ledger, without processes, clocks or torch.

`rules` has what every other module shares: lanes, options as numbers, what a ticket is; `order` says which source the
n-th grant gets, `ledger` decides tickets. It imports nothing of the package but `errors` and `protocols`. Open
`rules` first, then `ledger`.
"""
