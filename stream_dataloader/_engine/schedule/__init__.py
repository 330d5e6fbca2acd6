"""Assignment of sources to lanes, and the place of an epoch: pure functions and one ledger, no process, clock or torch.

It imports `memory`, `protocols`, `errors`. Open `rules` first, then `requests` (which lane reads what) and `snapshot`.
"""
