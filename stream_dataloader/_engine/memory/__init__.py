"""Memory and pickles that processes share.

This room imports only `errors` from the package. Open `shared_memory` first.
"""
