"""Map-style datasets as streams: groups of indices are sources, and what the dataset has at an index is an item.

`index_groups` holds the groups as flat arrays; `given_groups` makes them of what a user gives, and refuses what does
not fit the dataset; `streams` reads them. It imports `_reading`, `_items` and `_memory`. Open `index_groups` first.
"""
