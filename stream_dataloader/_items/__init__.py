"""What items are made of.

`structure` takes an item apart into leaves and builds it again, `layout` has its structure, dtypes and shapes,
`step_writer` writes many single steps of one layout, `fill` has what pads each leaf, `content` tells values apart by
their bytes, and `plain` makes plain data of layouts. It imports nothing of the package but `errors`. Open `layout`
first.
"""
