"""Packing: a loader whose workers each write a part of a store, whole or not at all.

It stands above the loader, which it imports. Open `driver` first.
"""
