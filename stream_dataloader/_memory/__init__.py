"""Memory and pickles that processes share.

`shared_memory` is memory that forked and spawned processes map alike, with a lock that the kernel frees when its holder
dies; `pickling` sends functions by value where they would not be found, as `main_module` tells. It imports nothing of
the package but `errors`. Open `shared_memory` first.
"""
