"""What mosaicml-streaming imports of it."""


class BatchEncoding(dict):
    """A batch there."""
