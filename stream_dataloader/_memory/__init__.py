"""Memory and pickles that processes share.

`shared_memory` is memory that forked and spawned processes map alike, with a lock that the kernel frees when its holder
dies; `pickling` sends functions by value. It imports nothing of the package but `errors`. Open `shared_memory` first.
"""
