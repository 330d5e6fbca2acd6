"""What mosaicml-streaming imports of it."""


class VisionDataset:
    """A base class there."""
