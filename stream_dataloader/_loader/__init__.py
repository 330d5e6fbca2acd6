"""What a `StreamDataLoader` is made of above its workers: an epoch, batch after batch, and where it stands.

`starter` starts an iteration, `iteration` makes batches of the parts that `collector` takes from the workers, also
after a death. `position` knows which epoch comes next, what was loaded and what was delivered, `epoch` follows the one
that is read and knows of each dataset that a batch has lanes of. `attributes` has what trainers ask for. It imports
`_workers`, `_ranks`, `_device` and what lies below. Open `iteration` first, then `position`.
"""
