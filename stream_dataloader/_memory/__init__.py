"""Memory and pickles that processes share.

It imports nothing of the package but `errors`. Open `shared_memory` first.
"""
