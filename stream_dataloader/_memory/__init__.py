"""Memory and pickles that processes share.

`shared_memory` is memory that forked and spawned processes map alike, with a lock that the kernel frees when its holder
dies. `fields` lays out named arrays in it. `pickling` sends functions by value where a new process would not find them,
which `main_module` decides, and `mapped_arrays` an array that is mapped from a file as its place there.
`endings` keeps handlers of signals from where what they raise is lost.
`copies` knows which CUDA devices may be reading host memory. It imports nothing of the package but `errors`. Open
`shared_memory` first.
"""
