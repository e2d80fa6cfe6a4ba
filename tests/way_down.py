"""Prints the frames from `gshard train` to the first dispatch of Algorithm 2, as JSON.

    python -m tests.way_down --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN ...

The trainer runs as it does for a user, with two changes. What it asks of the process that traces is
done in this process, so that one stack has all frames. And it stops at the einsum.

A line has the frame's file, its function, and the classes of its arguments.
"""

import inspect
import json
import os
import pathlib
import pickle
import types

from lingvo_gshard import cli, trainer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.spmd import tracer
from lingvo_gshard.train.estimator import Estimator

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGES = ("lingvo_gshard", "xla_spmd", "params")
_DISPATCH = "GSEC,GSM->EGCM"


class _Found(BaseException):
    """The einsum is reached; nothing catches this."""


class _Pipe:
    """Takes a request for the tracing process, and serves it."""

    def send_bytes(self, request):
        requests = types.SimpleNamespace(
            recv=lambda: pickle.loads(request), send=lambda answer: None
        )
        tracer._serve(requests, os.devnull)


def main():
    einsum = Numerics.einsum

    def recording(self, equation, *args, **options):
        if equation == _DISPATCH:
            print(json.dumps(_frames()))
            raise _Found
        return einsum(self, equation, *args, **options)

    Numerics.einsum = recording
    tracer._Child._start = lambda self, has_main: _Pipe()
    # The child's own preparations.
    tracer.child_process.end_with_parent = lambda: None
    tracer.environment.prepare_tracing = lambda: None
    tracer.os.dup2 = lambda *descriptors: None
    # The program does not depend on the state.
    Estimator._first_state = lambda self, restored, source: NestedMap(step=0)
    try:
        cli.run("trainer", trainer.main)
    except _Found:
        pass


def _frames():
    """The frames of this project down to the einsum, the first one first."""
    lines = []
    for info in reversed(inspect.stack()[1:]):
        path = pathlib.Path(info.filename)
        if not path.is_relative_to(_ROOT):
            continue
        name = path.relative_to(_ROOT).as_posix()
        if name.startswith(_PACKAGES):
            lines.append([name, info.function, _classes(info.frame)])
    return [*lines, ["lingvo_gshard/layers/numerics.py", "einsum", ["Numerics"]]]


def _classes(frame):
    """The classes of this project among the arguments of a frame."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = {type(frame.f_locals[name]) for name in names if name in frame.f_locals}
    own = [kind for kind in kinds if kind.__module__.startswith(_PACKAGES)]
    return sorted(kind.__name__ for kind in own)


if __name__ == "__main__":
    main()
