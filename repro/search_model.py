"""The accuracy of the search's cost model for compiled steps, for two models on 32 TPU v3 cores.

    python -m repro.search_model --out=FOLDER [--count=15]

Each model's candidates are sorted by their estimated steps, and `count` of them, at equal
distances, are compiled, even if they do not fit, and compared with their estimates. The plans are
kept in FOLDER, so that a later run continues where this one ended. A plan takes about two minutes
on one core.
"""

import pathlib

import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.plans import candidates, trials
from lingvo_gshard.plans import request as requests
from repro import families
from xla_plan.searches import agreement, trials_text
from xla_spmd.runtime import environment

_OUT = flags.DEFINE_string("out", None, "The folder of the plans.", required=True)
_COUNT = flags.DEFINE_integer("count", 15, "The candidates of each model to compile.", 2)
_TOPOLOGY = "v3:4x4"
_STACK = (
    "layers_as=LOOP",
    "num_layers=4",
    "dense.hidden_dim=2048",
    "layer.attention.num_heads=8",
    "layer.attention.head_dim=64",
)
_EXPERTS = ("num_experts=32", "hidden_dim=2048", "group_size=256", "dispatch=EINSUM")
_SIZES = (
    "task.source_vocab_size=8192",
    "task.target_vocab_size=8192",
    "task.dim=512",
    "input.batch_size=256",
    "input.source_len=128",
    "input.target_len=128",
)
_MODELS = {
    "toy.MoE8E8L": (*_STACK, *(f"moe.{setting}" for setting in _EXPERTS)),
    "toy.Dense4L": _STACK,
}


def main() -> None:
    environment.prepare_compiling()
    for model, stack in _MODELS.items():
        settings = (*_SIZES, *families.of_stacks(*stack))
        request = requests.make_request(model, _TOPOLOGY, settings, None).step_only()
        fitting = candidates.candidates(request)

        steps = []
        for i in np.linspace(0, len(fitting) - 1, _COUNT.value).astype(int):
            folder = pathlib.Path(_OUT.value, model)
            trial = trials.compile_trial(
                request, fitting[i].settings, folder, estimated_secs=fitting[i].secs
            )
            print(trials_text.trial_line(trial), flush=True)
            if trial.fits:
                steps.append((fitting[i].secs, trial.secs.step))
        print(f"{model}: {trials_text.agreement_line(agreement.of(steps))}", flush=True)


if __name__ == "__main__":
    cli.run("search_model", main)
