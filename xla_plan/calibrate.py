"""Measures one device of a kind, for plans of machines with such devices.

xla_plan calibrate --out=h100.json
xla_plan program --program=step.export --topology=h100:16x8 --out=PLAN --rates=h100.json

It takes about three minutes, and runs on JAX's first device.
"""

import functools

from absl import flags

from xla_plan import program_flags
from xla_spmd.files import storage
from xla_spmd.runtime import command_line, environment

flags.declare_key_flag("out")
_CPU_TIME = flags.DEFINE_bool(
    "cpu_time",
    False,
    "Whether to count the CPU time of this process in place of the wall time: for a CPU that other "
    "processes use, too.",
)


def main() -> None:
    """Prints each rate once it is measured, and writes all of them."""
    if program_flags.OUT.value is None:
        raise ValueError("--out is missing; see --help.")
    path = storage.path(program_flags.OUT.value)
    storage.check_file_writable("--out", path)
    environment.prepare()
    from xla_plan.measured import measure, rates

    clock = measure.cpu_clock if _CPU_TIME.value else measure.wall_clock
    measured = measure.measure(functools.partial(print, flush=True), clock)
    rates.save(measured, path)
    print(f"{measured.device}: rates in {path}")


def run() -> None:
    """The console entry."""
    command_line.run("calibrate", main)


if __name__ == "__main__":
    run()
