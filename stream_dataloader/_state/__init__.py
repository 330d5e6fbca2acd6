"""Where an epoch stands, and how that is saved.

`snapshot` says what is known between two steps, `tracker` follows an epoch as batches are delivered; `plain` makes a
state of it that json can hold, and reads one; `stretch` is the place of a run that is counted in stretches; `rest`
says whether anything is left of the epoch. It imports `_schedule` and what lies below. Open `snapshot` first.
"""
