"""The log lines that reach the user: our own, and libraries' warnings, except some greetings.

TensorFlow, XLA and gRPC write to standard error's descriptor, through absl's logging. Their info
lines (severity I) are dropped, like the lines of a short list, each for a stated reason. The
user gets all lines if TF_CPP_MIN_LOG_LEVEL is 0.
"""

import logging
import os
import re

from absl import logging as absl_logging

VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
# Severity W and above.
WARNINGS = "1"
_EVERYTHING = "0"

# `W1127 02:03:24.058375    4433 py_client.cc:492] `, or the time in microseconds before absl is
# initialized.
_PREFIX = r"{}\d{{4}} [\d:.]+ +\d+ {}:\d+\] "
# The beginnings of lines that say nothing about the program.
_GREETINGS = {
    "news": _PREFIX.format("I", r"\S+"),
    # TensorFlow logs its first info line before it reads the variable, and absl announces it.
    "announcement": r"WARNING: All log messages before absl::InitializeLog\(\) is called are ",
    # The second line of TensorFlow's notice that it is built for older CPUs. It only traces here.
    "instructions": r"To enable the following instructions: .*, rebuild TensorFlow with ",
    # JAX's service in process 0. It tracks live processes, so that the end of one does not end all.
    "recoverable service": (
        _PREFIX.format("W", r"coordination_service\.cc")
        + r"\[\d+\] Using experimental recoverable task"
    ),
    # Shardings over a mesh that lists its devices or that has axes of its own, as orders such as
    # shard(x, [1, 0]) require.
    "device lists": (
        _PREFIX.format("W", r"(?:export_shardings|utils)\.cc")
        + "This branch is not expected as JAX is not known to use"
    ),
    # TensorFlow looks for a GPU in the tracing process, which sees no GPU.
    "hidden GPUs": _PREFIX.format("E", r"cuda_platform\.cc") + "failed call to cuInit: ",
}
GREETING = "|".join(_GREETINGS.values())


class _Plain(logging.Formatter):
    """Formats a line without its time and place in the code; a warning begins with `warning: `."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno < logging.WARNING:
            return message
        return f"{record.levelname.lower()}: {message}"


def write_plainly() -> None:
    """Makes Python's log lines plain in this process, unless --verbosity=1 asks for more."""
    absl_logging.use_absl_handler()
    if not absl_logging.level_debug():
        absl_logging.get_absl_handler().setFormatter(_Plain())


def are_filtered() -> bool:
    """Returns whether greetings are dropped, which is the default."""
    return os.environ.get(VARIABLE) != _EVERYTHING


def is_greeting(line: str) -> bool:
    """Returns whether a line is a greeting that is dropped."""
    return are_filtered() and re.match(GREETING, line) is not None
