"""Command line: its commands, and the demo.

`main` lists the commands. Each is a module whose docstring is its help text. Open `main` first.
"""
