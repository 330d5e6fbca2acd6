"""What a `StreamDataLoader` is made of beside its worker processes: its settings, and where it stands.

`position` knows which epoch comes next, what was loaded and what was delivered, `epoch` follows the one that is read,
`member` is what is known of each dataset that a batch has lanes of, `settings` what worker processes are started with,
`attributes` what trainers ask for, and `kept_length` who asks for lengths. It imports `_ranks` and what lies below.
Open `position` first.
"""
