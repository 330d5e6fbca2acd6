"""Keeps `python -m stream_dataloader` from importing modules out of the current folder, which often holds the data.

Python puts the current folder before all others there, so a file `h5py.py` beside the data would be run, and an entry
point in a `.dist-info` too. `python -m` imports the package before its `__main__`, so the package imports this first
of all, and importing it is enough. The command `stream-dataloader` has no need of it.
"""

import os
import re
import sys
from contextlib import suppress


def _leave_out_current_folder() -> None:
    if sys.argv[:1] != ["-m"] or not re.search(r"^(-\w*m)?stream_dataloader(\.|$)", sys.orig_argv[-len(sys.argv)]):
        return  # another program that imports this package, to which its own folder belongs
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):  # the current folder was deleted
        # A clone that is not installed is run from its own folder, and workers find the package there.
        if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()] != [package]:
            del sys.path[0]


_leave_out_current_folder()
