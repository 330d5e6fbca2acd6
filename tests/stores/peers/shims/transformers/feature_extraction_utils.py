"""What mosaicml-streaming imports of it."""


class BatchFeature(dict):
    """A batch there."""
