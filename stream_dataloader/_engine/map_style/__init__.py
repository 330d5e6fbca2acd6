"""Map-style datasets as streams: each group of indices is a source, and `dataset[i]` is an item.

`index_groups` holds the groups as flat arrays. `given_groups` makes them from the user's `groups` or `lengths`, and
checks that they fit the dataset. `streams` reads them. This room imports `reading`, `items` and `memory`. Open
`index_groups` first.
"""
