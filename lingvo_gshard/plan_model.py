"""Plans a run's programs on a topology that nobody has at hand; all of them by default.

gshard plan model --model=m4.MoE2048E36L --topology=v3:32x32 --out=PLAN
gshard plan model --model=m4.MoE128E12L --topology=h100:16x8 --out=GPUS --save
gshard plan model --model=nllb.MoE54B --topology=h100:1x8 --out=PLAN --programs=decode
gshard plan model --from=config.json --topology=h100:1x8 --out=PLAN
"""

import functools

from absl import flags

from lingvo_gshard import cli, plan_flags
from xla_spmd.files import storage
from xla_spmd.runtime import environment

_TOPOLOGY = plan_flags.define_topology()
_SAVE = flags.DEFINE_bool(
    "save", False, "Whether to save OUT/executables for `train --executables` if the plan fits."
)
_RATES = flags.DEFINE_string(
    "rates",
    None,
    "A file of `gshard plan calibrate`, measured on one device of the topology's kind: the plan "
    "then has one more expected time.",
)
flags.adopt_module_key_flags(plan_flags)


def main() -> None:
    """Prints the plan, and changes that would make a training step fit if it does not."""
    model = plan_flags.check(_TOPOLOGY)
    request = plan_flags.request(model, _TOPOLOGY.value or "", default="all")
    request.check_sizes()
    if _SAVE.value and "train" not in request.programs:
        raise ValueError("--save saves training steps; expected train among --programs.")
    measured = None
    if _RATES.value is not None:
        from xla_plan.measured import rates

        measured = rates.load(storage.path(_RATES.value), _TOPOLOGY.value)

    # All mistakes but the compiler's have been reported by now, before JAX is imported.
    environment.prepare_compiling()
    from lingvo_gshard.plans import commands

    with plan_flags.working() as out:
        show = functools.partial(print, flush=True)
        commands.plan_model(request, out, _SAVE.value, show, measured)


if __name__ == "__main__":
    cli.run("plan model", main)
