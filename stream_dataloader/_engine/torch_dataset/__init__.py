"""A `StreamDataset` under torch's own `DataLoader`, or iterated over by itself; no code of the loader runs there.

It imports `reading` and what lies below. Open `parts` first (the parts of one worker), then
`sessions` (which epoch they belong to).
"""
