"""Runs a notebook in a kernel of its own, and writes it with what its cells showed. No cell's error ends it.

The tests run this as a program: a client of a kernel has threads and sockets, which end with it.
"""

import os
import sys
import tempfile

import nbclient
import nbformat


def main(path: str, executed: str, seconds: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # nothing of the user's is read or written
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            os.environ[name] = os.path.join(folder, name.lower())
        os.environ.pop("PYTEST_CURRENT_TEST", None)  # or a kernel leaves out what child processes print
        notebook = nbformat.read(path, as_version=4)
        options = {"timeout": int(seconds), "kernel_name": "python3", "allow_errors": True}
        nbclient.NotebookClient(notebook, **options).execute()
        nbformat.write(notebook, executed)


if __name__ == "__main__":
    main(*sys.argv[1:])
