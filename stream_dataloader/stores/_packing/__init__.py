"""Packing: the workers of a loader each write a part of a store.

It imports the loader. Open `driver` first.
"""
