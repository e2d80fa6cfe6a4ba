"""Plans any program: the memory, work and time of a call on devices that need not be at hand.

python -m xla_plan program --program=step.export --topology=v5p:4x4x4 --out=PLAN
"""

from absl import flags

from xla_plan import program_flags
from xla_plan.measured import rates
from xla_plan.plans import plan_folder
from xla_spmd.files import storage
from xla_spmd.hlo import kernels
from xla_spmd.runtime import command_line, environment

_KERNEL_FLOPS = flags.DEFINE_multi_string(
    "kernel_flops",
    [],
    "The flops of a run of a Pallas kernel or another custom call on a device, NAME=FLOPS, if "
    "nobody else gives them, such as flash_attention=8.6e9; repeatable.",
)
_DEVICE_ORDER = flags.DEFINE_list(
    "device_order",
    None,
    "The topology's device of each place in the mesh, flattened, such as 0,2,1,3; 0,1,2,... by "
    "default.",
)
_RATES = flags.DEFINE_string(
    "rates",
    None,
    "A file of `xla_plan calibrate`, measured on one device of the topology's kind: the plan then "
    "has one more expected time.",
)
flags.adopt_module_key_flags(program_flags)


def main() -> None:
    """Prints the plan in --out, and makes it first if needed."""
    program = program_flags.program()
    topology = program_flags.TOPOLOGY.value or ""
    order = _device_order()
    kernels.parse_flops(_KERNEL_FLOPS.value)
    measured = None
    if _RATES.value is not None:
        measured = rates.load(storage.path(_RATES.value), topology)

    # All mistakes but the program's own have been reported by now, before JAX is imported.
    environment.prepare_compiling()
    with environment.quiet_stderr():  # JAX 0.10 logs that a driver is missing.
        from xla_plan.plans import program_text, programs

    request = programs.FileRequest(
        path=program,
        topology=topology,
        options=programs.Options(
            mesh=program_flags.MESH.value,
            roles=program_flags.ROLE.value,
            categories=program_flags.CATEGORY.value,
            kernel_flops=_KERNEL_FLOPS.value,
            device_order=order,
        ),
    )
    with plan_folder.working(program_flags.OUT.value or "") as out:
        plan = programs.load_or_make(request, out)
        print(program_text.text(plan), flush=True)
        if measured is not None and plan.cost is not None:
            print(rates.described(plan.cost, measured))


def _device_order() -> tuple[int, ...] | None:
    """Returns the numbers of --device_order. Raises ValueError if they do not order the devices."""
    if _DEVICE_ORDER.value is None:
        return None
    what = f"--device_order={','.join(_DEVICE_ORDER.value)}"
    try:
        order = tuple(map(int, _DEVICE_ORDER.value))
    except ValueError:
        raise ValueError(f"{what}: expected numbers such as 0,2,1,3.") from None

    num_devices = program_flags.num_devices()
    if sorted(order) != list(range(num_devices)):
        raise ValueError(f"{what}: expected each number from 0 to {num_devices - 1} once.")
    return order


def run() -> None:
    """The console entry."""
    command_line.run("plan program", main)


if __name__ == "__main__":
    run()
