"""Small pieces for trainers that need more than `state_dict` and `load_state_dict`.

`lightning` is a callback, `accelerate` prepares a loader, and `transformers` is a Trainer on streams. Only
`_lightning_internals` touches what Lightning does not publish. Open `lightning` first.
"""
