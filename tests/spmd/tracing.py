"""Functions that the tracing process runs for tracer_test.py.

Scripts also import this module, like programs import their functions: without TensorFlow.
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
    """Returns a program whose name contains the number of the process that made it."""
    made = sgd(1)
    return Program(**{**vars(made), "name": f"{name}_{os.getpid()}"})


def refuses(what: str) -> Program:
    raise ValueError(f"{what} was refused.")


def fails() -> Program:
    return {}["a program"]


def warns() -> Program:
    """Writes a warning, a greeting of TensorFlow's, and the beginning of a line."""
    os.write(2, b"W1127 02:03:50.167440    5858 a.cc:492] a warning\n")
    os.write(2, b"I0000 00:00:1795744946.941126    4733 port.cc:153] news\nprogress 5%\r10%")
    return sgd(1)


def is_killed() -> Program:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def takes_long() -> Program:
    """Prints its process number to the parent's parent, and continues for a minute."""
    print(os.getpid(), flush=True)
    time.sleep(60)
    raise AssertionError


def dies(status: int) -> Program:
    print("a last word", file=sys.stderr, flush=True)
    os._exit(status)
