"""Who reads what and when, and where an epoch stands: pure functions and one ledger, no process, clock or torch.

It imports `_memory`, `protocols`, `errors`. Open `rules` first, then `tickets` (who reads what) and `snapshot`.
"""
