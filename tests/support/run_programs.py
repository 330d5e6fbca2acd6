"""Runs programs one after another, each in a process of its own, which is forked when torch is imported already.

Importing torch takes seconds, and the tests have dozens of small programs. A line of the input is one of them, as JSON;
the answer is its exit status. See `programs` in conftest.
"""

import atexit
import gc
import json
import os
import pathlib
import runpy
import signal
import sys
import threading
import traceback
import warnings

from huge_pages import use_huge_pages

import stream_dataloader  # noqa: F401

LIMIT_SECONDS = 240


def redirect(path, descriptor):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, descriptor)
    os.close(file)


def run(arguments, folder, flags, environment):
    """Run a program, and all that is done when one ends.

    Python is not taken down: that looks at each object there is, and so copies what torch has in memory.
    """
    signal.alarm(LIMIT_SECONDS)  # a program that hangs is killed, and the others go on
    os.chdir(folder)
    os.environ.update(environment)
    warnings._processoptions(flags)
    sys.argv, sys.path[0], status = arguments, os.path.dirname(arguments[0]), 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ending:
        status = ending.code or 0
    except BaseException as error:
        traceback.print_exc()
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def import_what_takes_seconds(command):
    """Optimizers import it, and most programs have none."""
    programs = [path for word in command if (path := pathlib.Path(word)).suffix == ".py" and path.exists()]
    if any("optim" in program.read_text(encoding="utf-8") for program in programs):
        import torch._dynamo  # noqa: F401


if __name__ == "__main__":
    use_huge_pages()
    gc.freeze()  # a child that ends need not look at what it did not make
    for line in sys.stdin:
        output, errors, alone, *program = json.loads(line)
        import_what_takes_seconds(program[0])
        if (child := os.fork()) == 0:
            if alone:
                os.setsid()
            redirect(output, 1)
            redirect(errors, 2)
            run(*program)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
