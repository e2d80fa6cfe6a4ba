"""One process of several that hold a state of eight partitions; run by tests.

    python -m tests.train.many FOLDER COORDINATOR NUM_PROCESSES PROCESS_ID ACTION...

Prints a line of JSON for each action: the peak memory minus the memory in use before, the bytes
that TensorStore read, and the exported files that were opened.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys

from tests.train.host_memory import extra_bytes
from xla_spmd.runtime import environment

NUM_PARTITIONS, NUM_EXPERTS, NUM_LAYERS = 8, 32, 5
EXPERT_BYTES = 2 * 2**20
PART_BYTES = 10 * 2**20


def _spec():
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.sharding.layout import TensorSpec

    return NestedMap(
        step=TensorSpec((), "int32", ""),
        theta=NestedMap(
            gate=TensorSpec((512, NUM_EXPERTS), "float32", "M_"),
            query=TensorSpec((512, 1024), "float32", "MH"),
            wi=[TensorSpec((NUM_EXPERTS, 512, 1024), "float32", "EMH")] * NUM_LAYERS,
        ),
    )


def _bytes_read():
    import tensorstore

    found = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(value["value"] for metric in found for value in metric["values"])


class _Member:
    """The actions; all processes do the same ones."""

    def __init__(self, folder):
        from lingvo_gshard.checkpoints.checkpoints import Contents
        from lingvo_gshard.core.hyperparams import Params
        from lingvo_gshard.sharding.layout import Partitioning
        from lingvo_gshard.spmd import specs
        from lingvo_gshard.train.config import train_params
        from xla_spmd.mesh import Mesh

        self._folder = pathlib.Path(folder)
        self._spec = _spec()
        parts = Partitioning.from_dict(Mesh.flat(NUM_PARTITIONS), {"E": "d"})
        self._shardings = specs.shardings(parts, self._spec, specs.device_mesh(parts))
        p = Params()
        p.Define("train", train_params(), "")
        self._contents = Contents(p, parts, self._spec)
        self.state, self._step = None, 1

    def perform(self, action):
        """Performs an action to its end: JAX copies the arrays of a state in the background."""
        import jax

        getattr(self, action)()
        jax.block_until_ready(self.state.Flatten())

    def make(self):
        """Makes the state after one step."""
        self.state = self._made(1)

    def _made(self, step):
        """Returns the state after `step` steps: whole numbers, exact for every partitioning."""
        import jax
        import numpy as np

        def value(spec, sharding):
            def part(index):
                ranges = [np.arange(n)[s] for s, n in zip(index, spec.shape, strict=True)]
                return np.asarray(sum(np.ix_(*ranges)) * step, spec.dtype)

            return jax.make_array_from_callback(spec.shape, sharding, part)

        pairs = zip(self._spec.Flatten(), self._shardings.Flatten(), strict=True)
        return self._spec.Pack([value(spec, sharding) for spec, sharding in pairs])

    def _checkpoints(self):
        from lingvo_gshard.checkpoints.checkpoints import Checkpoints

        return Checkpoints(self._folder / "run", self._contents)

    def save(self):
        """Saves the state of the current step."""
        with self._checkpoints() as saved:
            saved.save(self._step, self.state, {})

    def step(self):
        """Trains one step."""
        import jax

        pairs = zip(self.state.Flatten(), self._made(1).Flatten(), strict=True)
        self.state = self.state.Pack([jax.jit(jax.numpy.add)(a, b) for a, b in pairs])
        self._step += 1

    def die(self):
        """Begins to save, and kills the last process."""
        import jax

        with self._checkpoints() as saved:
            saved.save(self._step, self.state, {})
            if jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def restore(self):
        """Continues from the newest checkpoint."""
        with self._checkpoints() as saved:
            spec, shardings = self._spec, self._shardings
            restored = saved.newest(lambda step: saved.restore(step, spec, shardings))
        self.state, self._step = restored.state, restored.step

    def export(self):
        """Exports the weights of step 1."""
        from lingvo_gshard.checkpoints import exported
        from lingvo_gshard.checkpoints.checkpoints import Checkpoints

        with Checkpoints(self._folder / "run") as saved:
            arrays = saved.arrays(1)
            weights = {name: array for name, array in arrays.items() if name.startswith("theta.")}
            exported.write(self._folder / "w.safetensors", weights, 1, PART_BYTES)

    def begin_from_run(self):
        """Begins anew with the weights of the newest checkpoint."""
        self._begin("run")

    def begin_from_parts(self):
        """Begins anew with the exported weights."""
        self._begin("w.safetensors.index.json")

    def _begin(self, source):
        from lingvo_gshard.checkpoints.warm_start import WarmStart

        with contextlib.redirect_stdout(sys.stderr):
            start = WarmStart(str(self._folder / source), (("theta.*", "SAME"),))
            self.state = start.apply(self.state, self._spec)

    def check(self):
        """Fails unless the state equals its step's expected state bit for bit."""
        import numpy as np

        pairs = zip(self.state.FlattenItems(), self._made(self._step).Flatten(), strict=True)
        for (path, found), wanted in pairs:
            shards = zip(found.addressable_shards, wanted.addressable_shards, strict=True)
            for one, other in shards:
                np.testing.assert_array_equal(one.data, other.data, err_msg=path)


def _run(folder, actions):
    opened = set()

    def hook(event, args):
        if event == "open" and str(args[0]).startswith(folder):
            opened.add(pathlib.Path(str(args[0])).name)

    sys.addaudithook(hook)
    member = _Member(folder)
    for action in actions:
        before = _bytes_read()
        opened.clear()
        memory = extra_bytes(functools.partial(member.perform, action))
        files = sorted(name for name in opened if "safetensors" in name)
        counts = {"memory": memory, "read": _bytes_read() - before, "files": files}
        print(json.dumps({action: counts}), flush=True)


def main(folder, coordinator, num_processes, process_id, *actions):
    """Joins the other processes and performs the actions of the command line."""
    count = NUM_PARTITIONS // int(num_processes)
    # Not prepare(num_devices=...): this keeps freed memory in the process, where it would count.
    flag = f"--xla_force_host_platform_device_count={count}"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=flag)
    environment.prepare()
    from lingvo_gshard.spmd import processes

    number = int(process_id)
    settings = processes.Processes(coordinator, int(num_processes), number, timeout_secs=120)
    with processes.joined(settings):
        _run(folder, actions)


if __name__ == "__main__":
    main(*sys.argv[1:])
