"""Packing: a loader whose workers each write a part of a store, whole or not at all.

`driver` is `stores.pack`, `given` what there is to pack. The loader reads one report a stream: `writer` packs the
stream, of whose steps `items` tells, where the loader opens it. `journal` knows what is packed already, `folder` is the
place where it is done, `space` says whether the disk will do, and `report` tells of it. It stands above the loader,
which it imports. Open `driver` first.
"""
