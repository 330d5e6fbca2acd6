"""`python -m stream_dataloader`: the command line, see `cli`."""

import sys

from stream_dataloader.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
