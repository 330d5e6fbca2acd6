"""The command line: its commands, and the demo.

`main` has the commands, each a module whose docstring is its help. `arguments` is what they share,
`target` finds what they read, `probe` tells what a file holds, and `film` draws what lanes read.
It may import all of the package; nothing imports it. Open `main` first.
"""
