"""What items are made of.

`layout` takes an item apart into leaves and says of which structure, dtypes and shapes it is. It imports nothing of
the package but `errors`. Open `layout`.
"""
