"""The command line: its commands, and the demo.

`main` has the commands, each a module whose docstring is its help. Open `main` first.
"""
