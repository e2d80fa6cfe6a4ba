"""Makes a run that keeps the experts which some languages use, and drops or merges the others.

    gshard train --logdir=RUN --mode=eval
    gshard prune --logdir=RUN --languages=de,fr --keep=0.25 --out=NEW
    gshard translate --logdir=NEW < in.txt > out.txt

The evaluation counts how often each language of dev chooses each expert. Every layer keeps the
share --keep of its experts, the ones that are chosen most. NEW is a run of step 0: it is decoded,
evaluated, exported, planned and trained like any other. The weights are copied expert by expert, so
a model may be larger than this machine's memory. If the process is killed, the same command
continues.
"""

import shlex

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.runs import launch as launches
from xla_spmd.files import storage, table
from xla_spmd.runtime import environment

_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of an evaluated run.", required=True)
_OUT = flags.DEFINE_string("out", None, "The folder of the new run.", required=True)
_LANGUAGES = flags.DEFINE_list(
    "languages", None, "The languages whose experts stay, as evaluation names them.", required=True
)
_KEEP = flags.DEFINE_float(
    "keep", None, "The share of a layer's experts that stay, rounded up.", required=True
)
_MERGE = flags.DEFINE_bool("merge", False, "Merge the other experts into those that stay.")
_MULTIPLE_OF = flags.DEFINE_integer(
    "multiple_of", 1, "Keep a multiple of this, such as the devices that will share experts."
)
cli.define_imports()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Prunes the run; raises ValueError for a user's mistake."""
    from lingvo_gshard.runs import prune_request

    request = prune_request.Request(
        languages=tuple(dict.fromkeys(_LANGUAGES.value)),
        keep=_KEEP.value,
        is_merged=_MERGE.value,
        multiple_of=_MULTIPLE_OF.value,
    )
    storage.check_writable(_OUT.value)
    with storage.working(_LOGDIR.value) as logdir, storage.working(_OUT.value) as out:
        # Without a run, or with a wrong request, nothing needs to start.
        launch = launches.recorded(str(logdir))
        request.num_kept(launch.model, launches.experiment_params(launch), str(logdir))
        request.loads(str(logdir))
        launches.check_weights(launch, str(logdir))
        prune_request.check_new(out)

        # Experts are copied and hashed, which needs no accelerator.
        environment.prepare(1, "cpu")
        from lingvo_gshard.runs import pruning
        from lingvo_gshard.runs.run import open_run

        done = pruning.prune(open_run(launch, str(logdir), 1), out, request)

    rows = [("layer", "experts", "of", "their share of choices, %")]
    for layer, experts in done.kept.items():
        stack = layer.rpartition("_")[0]
        share = f"{100 * experts.share:.1f}"
        rows.append((layer, str(len(experts.ids)), str(done.num_experts[stack]), share))
    print(table.text(rows))
    print(
        f"{done.model}: {done.num_weights:,} of {done.num_weights_before:,} weights. Wrote "
        f"{_OUT.value}. Next: gshard translate --logdir={shlex.quote(_OUT.value)} < in.txt"
    )


if __name__ == "__main__":
    cli.run("prune", main)
