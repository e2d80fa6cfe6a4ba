"""Functions that the tracing process runs for tracer_test.py.

A script imports this module, too, as programs do those of their functions: without TensorFlow.
"""

import os
import signal
import sys
import time

from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.program import Program


def sgd(num_partitions: int) -> Program:
    from tests.spmd import functions

    return lowering.export(functions.sgd_step(), functions.partitioning(num_partitions))


def pid(name: str) -> Program:
    """A program whose name has the number of the process that made it."""
    made = sgd(1)
    return Program(**{**vars(made), "name": f"{name}_{os.getpid()}"})


def refuses(what: str) -> Program:
    raise ValueError(f"{what} was refused.")


def fails() -> Program:
    return {}["a program"]


def is_killed() -> Program:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def takes_long() -> Program:
    """Prints the number of its process to the parent's parent, and goes on for a minute."""
    print(os.getpid(), flush=True)
    time.sleep(60)
    raise AssertionError


def dies(status: int) -> Program:
    print("a last word", file=sys.stderr, flush=True)
    os._exit(status)
