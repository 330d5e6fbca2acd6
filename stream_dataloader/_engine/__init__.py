"""The engine: everything between a `StreamDataset` and its batches; see README.md in this folder."""
