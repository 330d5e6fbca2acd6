"""Small pieces for trainers that need more than `state_dict` and `load_state_dict`."""
