"""The paper's Table 2 in miniature: tokens to a loss, MoE and dense at equal flops per token.

    python -m bench.sample_efficiency --data_dir=out/demo/data --out=out/sample_efficiency
    python -m bench.sample_efficiency --data_dir=out/figure6/data/all --out=out/figure6/runs \
        --family=small --experts=8,32,128 --layers=4,8,12 --seeds=2 --steps=2400

The second command uses the text and the runs of bench.figure6, which begin to cool down at step
4800. --layers adds deeper and shallower models with the first number of experts, whose flops per
token differ (Table 2's other question). An interrupted run continues from its last checkpoint. A
finished run is only read.
"""

import functools
import itertools
import pathlib

from absl import app, flags

from bench import curves, families, multilingual

_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", 800, "The training steps of each run to compare.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "The number of runs of each model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_LAYERS = flags.DEFINE_list("layers", [], "The even numbers of layers to try, with experts.")
_FAMILIES = {"toy": families.TOY, "small": families.SMALL}
_FAMILY = flags.DEFINE_enum("family", "toy", list(_FAMILIES), "The models to compare.")


def main(argv: list[str]) -> None:
    del argv
    out, data, steps = pathlib.Path(_OUT.value), pathlib.Path(_DATA_DIR.value), _STEPS.value
    counts, depths = (list(map(int, flag.value)) for flag in (_EXPERTS, _LAYERS))
    models = list(_FAMILIES[_FAMILY.value].models(counts, depths))
    # All models train with one seed before the next, so that finished runs can be compared early.
    logdirs = multilingual.in_parallel(
        functools.partial(multilingual.seeded, out, model, seed, data, steps)
        for seed, model in itertools.product(range(1, _SEEDS.value + 1), models)
    )
    dense, *mixtures = (
        multilingual.runs_of(model.name, logdirs[i :: len(models)], steps)
        for i, model in enumerate(models)
    )
    print(curves.text(dense, mixtures))


if __name__ == "__main__":
    app.run(main)
