"""Exports a trained model as a bundle: a folder that translates without TensorFlow or the run.

    python -m lingvo_gshard.export_bundle --logdir=RUN --bundle=DIR --num_partitions=2
    python -m lingvo_gshard.translate --bundle=DIR < in.txt > out.txt

A bundle holds programs, weights, vocabularies and the code that runs them. Its number of devices
and its beam are fixed. JAX promises to read its programs for six months after the release that
wrote them. A newer release makes them again from the bundle itself:

    python -m lingvo_gshard.export_bundle --from_bundle=DIR --bundle=NEW
"""

from absl import flags

from lingvo_gshard import cli, decoder_flags
from lingvo_gshard.spmd import environment

_FROM_BUNDLE = flags.DEFINE_string("from_bundle", None, "An older bundle, in place of --logdir.")
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)


def main() -> None:
    """Writes the bundle; raises ValueError for a user's mistake."""
    # One source, a run or an older bundle, and one folder to write.
    logdir = decoder_flags.LOGDIR.value
    older = _FROM_BUNDLE.value
    folder = decoder_flags.BUNDLE.value
    if folder is None or (logdir is None) == (older is None):
        raise ValueError(
            "give --bundle, the folder to write, and either --logdir, a run, or --from_bundle, an "
            "older bundle; see --help."
        )
    if cli.processes():
        raise ValueError("one process exports a bundle; start it without the others.")

    if older is not None:
        from lingvo_gshard.runs.run import export_again
        from lingvo_gshard.translation import bundle

        # Nothing is computed, so CPU devices may stand for those that the bundle is for.
        environment.prepare(bundle.load_spec(older).num_partitions, "cpu")
        export_again(older, folder)
    else:
        with decoder_flags.opened_run() as run:
            run.export_bundle(folder)

    command = f"python -m lingvo_gshard.translate --bundle={folder} < in.txt > out.txt"
    print(f"Wrote {folder}: {command}")


def run() -> None:
    """Runs `main` with the flags of the command line."""
    cli.run("export_bundle", main)


if __name__ == "__main__":
    run()
