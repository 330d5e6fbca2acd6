"""Packing: a loader whose workers each write a part of a store, whole or not at all.

`driver` is `stores.pack`, `given` what there is to pack. The loader reads reports: `writer` packs the streams, of whose
steps `items` tells, where the loader opens them. `journal` knows what is packed already, `folder` is the place where it
is done, and `report` tells of it, and says whether the disk will do. It stands above the loader, which it imports. Open
`driver` first.
"""
