"""What items are made of.

`structure` takes an item apart into leaves and builds it again, `layout` says of which structure, dtypes and shapes it
is, `fill` what pads each leaf. It imports nothing of the package but `errors`. Open `layout` first.
"""
