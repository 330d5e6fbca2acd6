"""Packing: a loader whose workers each write a part of a store.

It imports the loader. Open `driver` first.
"""
