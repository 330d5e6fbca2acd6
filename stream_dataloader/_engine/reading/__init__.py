"""The inside of one worker: it takes, opens and reads sources, window by window.

It imports `assembly` and what lies below. Open `plan` first (what is read and how), then `reader` and `lane`.
"""
