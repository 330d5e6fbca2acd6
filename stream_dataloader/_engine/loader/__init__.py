"""The layer of a `StreamDataLoader` above its workers: delivers an epoch batch by batch, and keeps its position.

`starter` starts an iteration. `iteration` makes batches of the parts that `collector` takes from the workers, also
after a worker died. `position` knows the coming epoch, the loaded state and what was delivered; `epoch` follows the
epoch that is being read. `attributes` holds the attributes that trainers look up. This room imports `workers`,
`ranks`, `device` and the rooms below. Open `iteration` first, then `position`.
"""
