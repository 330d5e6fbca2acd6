"""What items are made of.

`structure` takes an item apart into leaves and builds it again, `layout` has dtypes and shapes, too, `step_writer`
writes many of one layout, `fill` pads, `content` hashes values, and `plain` makes plain data. It imports `errors`.
Open `layout` first.
"""
