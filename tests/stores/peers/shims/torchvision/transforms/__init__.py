"""What mosaicml-streaming imports of it."""
