"""One device of several, which runs a separate program; run by tests.

    python -m tests.repro.tables.device_process FOLDER COORDINATOR NUM_DEVICES DEVICE

Reads DEVICE.hlo and its arguments DEVICE.npz, in their order, and writes the result to DEVICE.npy.
"""

import pathlib
import sys

import numpy as np

from xla_spmd.runtime import environment


def main():
    folder = pathlib.Path(sys.argv[1])
    coordinator = sys.argv[2]
    num_devices, device = map(int, sys.argv[3:])

    environment.prepare(num_devices=1)
    import jax

    from repro.tables import mpmd

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_devices, device)
    compiled = mpmd.compile_program((folder / f"{device}.hlo").read_bytes(), jax.devices())

    with np.load(folder / f"{device}.npz") as arguments:
        placed = [jax.device_put(arguments[name]) for name in arguments.files]
    results = compiled.runtime_executable().execute_sharded(placed)
    ((y,),) = results.disassemble_into_single_device_arrays()
    np.save(folder / f"{device}.npy", y)


if __name__ == "__main__":
    main()
