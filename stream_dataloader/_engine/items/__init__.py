"""Items: their structure, their layout, and code that writes, pads and hashes them.

`structure` takes an item apart into leaves and builds it again. `layout` adds dtypes and shapes. `step_writer` writes
many items of one layout, `fill` pads, `content` hashes values, and `plain` makes plain data. This room imports
`errors`. Open `layout` first.
"""
