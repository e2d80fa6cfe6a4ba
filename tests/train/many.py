"""One process of several that hold a state of eight partitions; run by tests.

    python -m tests.train.many FOLDER COORDINATOR NUM_PROCESSES PROCESS_ID ACTION...

Prints, as JSON, for each action: the most memory that it took beyond what was used before, the bytes
that TensorStore read, and the exported files that were opened. `dies` is a save during which the
last process kills itself.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys

from lingvo_gshard.spmd import environment
from tests.train.host_memory import extra_bytes

NUM_PARTITIONS, NUM_EXPERTS, NUM_LAYERS = 8, 16, 4
EXPERT_BYTES = 4 * 2**20
PART_BYTES = 20 * 2**20


def _spec():
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.sharding.layout import TensorSpec

    return NestedMap(
        step=TensorSpec((), "int32", ""),
        theta=NestedMap(
            gate=TensorSpec((1024, NUM_EXPERTS), "float32", "M_"),
            query=TensorSpec((1024, 512), "float32", "MH"),
            wi=[TensorSpec((NUM_EXPERTS, 1024, 1024), "float32", "EMH")] * NUM_LAYERS,
        ),
    )


def _bytes_read():
    import tensorstore

    found = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(value["value"] for metric in found for value in metric["values"])


class _Member:
    """What each action does; all processes do the same."""

    def __init__(self, folder):
        from lingvo_gshard.sharding.layout import Partitioning
        from lingvo_gshard.sharding.mesh import Mesh
        from lingvo_gshard.spmd import specs
        from lingvo_gshard.train.checkpoints import Contents

        self._folder = pathlib.Path(folder)
        self._spec = _spec()
        parts = Partitioning.from_dict(Mesh.flat(NUM_PARTITIONS), {"E": "d"})
        self._shardings = specs.shardings(parts, self._spec, specs.device_mesh(parts))
        self._contents = Contents("", parts, self._spec)
        self.state = None

    def make(self):
        self.state = self._made(1)

    def _made(self, step):
        """The state after `step` steps, each of which doubles it and adds one."""
        import jax
        import numpy as np

        def value(spec, sharding):
            def part(index):
                begins = [s.indices(n)[0] for s, n in zip(index, spec.shape, strict=True)]
                sizes = [len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True)]
                grid = sum(np.ix_(*[b + np.arange(n) for b, n in zip(begins, sizes, strict=True)]))
                return np.asarray(grid * step, spec.dtype)

            return jax.make_array_from_callback(spec.shape, sharding, part)

        pairs = zip(self._spec.Flatten(), self._shardings.Flatten(), strict=True)
        return self._spec.Pack([value(spec, sharding) for spec, sharding in pairs])

    def _checkpoints(self):
        from lingvo_gshard.train.checkpoints import Checkpoints

        return Checkpoints(self._folder / "run", self._contents)

    def save(self):
        with self._checkpoints() as saved:
            saved.save(1, self.state, {})

    def dies(self):
        import jax

        with self._checkpoints() as saved:
            saved.save(2, self._made(2), {})
            if jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def restore(self):
        with self._checkpoints() as saved:
            restored = saved.restore_newest(self._spec, self._shardings)
        assert restored.step == 1
        self._check(restored.state, self._made(1))

    def export(self):
        from lingvo_gshard.train import export
        from lingvo_gshard.train.checkpoints import Checkpoints

        with Checkpoints(self._folder / "run") as saved:
            arrays = saved.arrays(1)
            weights = {name: array for name, array in arrays.items() if name.startswith("theta.")}
            export.write(self._folder / "w.safetensors", weights, 1, PART_BYTES)

    def begin_from_run(self):
        self._begin("run")

    def begin_from_parts(self):
        self._begin("w.safetensors.index.json")

    def begin_from_file(self):
        self._begin("one.safetensors")

    def _begin(self, source):
        from lingvo_gshard.train.warm_start import WarmStart

        with contextlib.redirect_stdout(sys.stderr):
            start = WarmStart(str(self._folder / source), (("theta.*", "SAME"),))
            self.state = start.apply(self.state, self._spec)

    def check(self):
        self._check(self.state, self._made(1))

    def _check(self, found, wanted):
        import numpy as np

        for a, b in zip(found.Flatten(), wanted.Flatten(), strict=True):
            for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))


def _run(folder, actions):
    opened = set()

    def hook(event, args):
        if event == "open" and str(args[0]).startswith(folder):
            opened.add(pathlib.Path(str(args[0])).name)

    sys.addaudithook(hook)
    member, counts = _Member(folder), {}
    for action in actions:
        before = _bytes_read()
        opened.clear()
        extra = extra_bytes(getattr(member, action))
        files = sorted(name for name in opened if "safetensors" in name)
        counts[action] = {"memory": extra, "read": _bytes_read() - before, "files": files}
    print(json.dumps(counts), flush=True)


def main(folder, coordinator, num_processes, process_id, *actions):
    """Joins the others and does what the command line says."""
    count = NUM_PARTITIONS // int(num_processes)
    # Not prepare(num_devices=...): it keeps freed memory in the process, where it would count.
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
