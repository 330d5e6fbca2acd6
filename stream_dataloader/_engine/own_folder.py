"""Protection of `python -m stream_dataloader` against modules in the current folder, which often holds the data.

With `python -m`, Python searches the current folder first. So a file `h5py.py` beside the data would be run, and an
entry point in a `.dist-info`, too. `python -m` imports the package before its `__main__`, so the package imports this
module first, and importing it is enough. The command `stream-dataloader` does not need it.
"""

import os
import re
import sys
from contextlib import suppress


def _leave_out_current_folder() -> None:
    if sys.argv[:1] != ["-m"] or not re.search(r"^(-\w*m)?stream_dataloader(\.|$)", sys.orig_argv[-len(sys.argv)]):
        return  # another program imports this package, and needs its own folder
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with suppress(OSError):  # the current folder may have been deleted
        # A clone that is not installed is run from its own folder, and workers find the package there.
        if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()] != [package]:
            del sys.path[0]


_leave_out_current_folder()
