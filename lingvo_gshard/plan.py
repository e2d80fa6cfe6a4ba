"""Plans: what a program would need and cost on a TPU topology that nobody has at hand.

python -m lingvo_gshard.plan --table=operators
"""

from __future__ import annotations

from absl import flags

from lingvo_gshard import binary

_TABLES = ("operators",)

_TABLE = flags.DEFINE_enum("table", None, _TABLES, "A table of the paper, made here.")

# Those of Table 4 that are compiled for virtual devices.
_NUM_DEVICES = 8


def main(argv: list[str]) -> None:
    del argv
    # Loaded only now: TensorFlow and JAX read the environment when they are.
    from lingvo_gshard.analysis import operators
    from lingvo_gshard.spmd import topology

    match _TABLE.value:
        case "operators":
            places = operators.OWN_DEVICES
            if topology.is_installed():
                places += operators.TPU_V3
            else:
                print("Without TPUs, which `make setup-tpu` installs the compiler for.")
            print(operators.table(operators.rows(places)))
        case None:
            raise ValueError(f"give --table, one of {', '.join(_TABLES)}")


def run() -> None:
    """The console entry."""
    binary.run("plan", main, lambda: _NUM_DEVICES)


if __name__ == "__main__":
    run()
