"""Adapters for trainers that need more than `state_dict` and `load_state_dict`.

`lightning` has a callback, `accelerate` prepares a loader, and `transformers` has a Trainer for streams. Only
`_lightning_internals` uses private parts of Lightning. Open `lightning` first.
"""
