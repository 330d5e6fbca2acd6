"""Inside one worker: sources are taken, opened and read, window by window.

`source_queue` is the shared list of sources, `opener` and `stream` open and read one, `lane` cuts streams into
windows of one row, and `reader` drives all lanes of a worker. It imports `_assembly` and what lies below. Open
`reader` first, then `lane`.
"""
