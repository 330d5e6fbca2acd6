"""Runs programs one after another, each in a process of its own, which is forked when torch is imported already.

Importing torch takes seconds, and the pages have dozens of small programs. Each line of the input names a program and
the files for what it prints; the answer is a line with its exit status.
"""

import gc
import os
import runpy
import signal
import sys
import traceback

import torch._dynamo  # noqa: F401 - what optimizers import takes seconds

import stream_dataloader  # noqa: F401

LIMIT_SECONDS = 240


def redirect(path, descriptor):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, descriptor)
    os.close(file)


def run(program):
    signal.alarm(LIMIT_SECONDS)  # a program that hangs is killed, and the others go on
    os.chdir(os.path.dirname(program))
    sys.argv = [program]
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)  # the way a program ends, with all that is done then


if __name__ == "__main__":
    gc.freeze()  # a child that ends need not look at what it did not make
    for line in sys.stdin:
        program, output, errors = line.rstrip("\n").split("\t")
        if (child := os.fork()) == 0:
            redirect(output, 1)
            redirect(errors, 2)
            run(program)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
