"""Stands in for torchvision, which mosaicml-streaming imports for classes that no test of ours uses."""
