"""What items are made of.

`layout` takes an item apart into leaves and says of which structure, dtypes and shapes it is; `fill` says what pads
each of them. It imports nothing of the package but `errors`. Open `layout` first.
"""
