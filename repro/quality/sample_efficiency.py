"""The paper's Table 2 in miniature: tokens to a loss, MoE and dense at equal flops per token.

    python -m repro.quality.sample_efficiency --family=toy --data_dir=out/demo/data \
        --out=out/sample_efficiency
    python -m repro.quality.sample_efficiency --family=narrow --data_dir=out/figure6/data/all \
        --out=out/figure6/runs --experts=8,32,128 --layers=4,8,12 --seeds=2

The second command uses the text and the runs of repro.quality.figure6. --layers adds deeper and
shallower models with the first number of experts, whose flops per token differ (Table 2's other
question). --shares=0.7 also trains the model with this number of experts in 0.7 of the steps, with
a learning rate that falls to zero at their end. Otherwise, only the dense model's last loss would
benefit from this fall. An interrupted run continues from its last checkpoint. A finished run is
only read.
"""

import dataclasses
import functools
import itertools
import pathlib

from absl import flags

from lingvo_gshard import cli
from repro.quality import curves, multilingual

_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", None, "The steps to compare; by default, the family's.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "The number of runs of each model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_LAYERS = flags.DEFINE_list("layers", [], "The even numbers of layers to try, with experts.")
_SHARES = flags.DEFINE_list("shares", [], "Shares of the steps to try, in (0, 1), with experts.")


def main() -> None:
    out = pathlib.Path(_OUT.value)
    data = pathlib.Path(_DATA_DIR.value)
    family = multilingual.family()
    family = dataclasses.replace(family, steps=_STEPS.value or family.steps)

    counts = multilingual.whole_numbers(_EXPERTS)
    depths = multilingual.layers(_LAYERS)
    shares = _numbers(_SHARES)
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"--shares={','.join(_SHARES.value)}: expected shares between 0 and 1.")
    models = list(family.models(counts, depths, shares))

    # All models train with one seed before the next one, so that early results can be compared.
    logdirs = multilingual.in_parallel(
        functools.partial(multilingual.seeded, out, model, seed, data)
        for seed, model in itertools.product(range(1, _SEEDS.value + 1), models)
    )
    dense, *mixtures = (
        multilingual.runs_of(model, logdirs[i :: len(models)]) for i, model in enumerate(models)
    )
    print(curves.text(dense, mixtures))


def _numbers(flag: flags.FlagHolder[list[str]]) -> list[float]:
    """Returns a flag's items as numbers. Raises ValueError if an item is something else."""
    try:
        return list(map(float, flag.value))
    except ValueError:
        given = ",".join(flag.value)
        raise ValueError(f"--{flag.name}={given}: expected numbers with commas between.") from None


if __name__ == "__main__":
    cli.run("sample_efficiency", main)
