"""What mosaicml-streaming imports of it."""


class AutoTokenizer:
    """Tokenizers there."""
