"""Packing: streams of any kind become a store, by several processes, in one piece or not at all.

`driver` is `stores.pack`, `given` what there is to pack, `run` has it packed, `ledger` decides who packs what (pure),
`journal` knows what is packed already, `folder` is the place where it is done, `crew` the processes, `worker` what runs
in them, `items` one stream's time steps, `space` says whether the disk will do, and `progress` and `report` tell of it.
It imports `_base`, `_items`, `_memory`, `errors`, `stream_info` and the lock of `streams.cache`. Open `driver` first.
"""
