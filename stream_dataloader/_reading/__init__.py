"""Inside one worker: sources are taken, opened and read, window by window.

`plan` says what is read and how, and which lanes of it a worker has. `sessions` says which iteration a worker takes
part in, and lanes take their sources from a `source_queue`. `opener` and `stream` open and read one, `windows` cuts it,
`lane` reads one after the other into a row, and `reader` drives all lanes of a worker, and starts that; `plain` does so
for torch's own `DataLoader`; `activity` records what each is doing. It imports `_assembly` and what lies below. Open
`plan` first, then `reader` and `lane`.
"""
