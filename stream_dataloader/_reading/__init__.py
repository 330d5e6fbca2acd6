"""Inside one worker: sources are taken, opened and read, window by window.

It imports `_assembly` and what lies below. Open `plan` first (what is read and how), then `reader` and `lane`.
"""
