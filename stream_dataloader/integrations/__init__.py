"""Small pieces for trainers that need more than `state_dict` and `load_state_dict`.

`lightning` is a callback for Lightning, `accelerate` prepares a loader for Accelerate, and `transformers` is Hugging
Face's Trainer on streams. Modules with an underscore are parts of them: `_lightning_internals` alone touches what
Lightning does not publish. It may import all of the package but `testing` and `cli`; nothing imports it. Open
`lightning` first.
"""
