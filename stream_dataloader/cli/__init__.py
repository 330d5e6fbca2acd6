"""The command line: its commands, and the demo.

`main` has the commands, each a module whose docstring is its help. `arguments` is what they share. Open `main` first.
"""
