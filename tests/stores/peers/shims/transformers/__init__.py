"""Stands in for transformers, which mosaicml-streaming imports for a class that no test of ours uses."""


class PreTrainedTokenizerBase:
    """What `datasets` compares classes with, wherever transformers has been imported."""
