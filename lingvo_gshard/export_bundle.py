"""Exports a trained model as a bundle: a folder that translates without TensorFlow or the run.

    python -m lingvo_gshard.export_bundle --logdir=RUN --bundle=DIR --num_partitions=2
    python -m lingvo_gshard.translate --bundle=DIR < in.txt > out.txt

A bundle holds programs, weights, vocabularies and the code that runs them. Its number of devices
and its beam are fixed. JAX promises to read its programs for six months after the release that
wrote them; this command exports them again.
"""

from absl import flags

from lingvo_gshard import cli, decoder_flags

cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)


def main() -> None:
    """Writes the bundle; raises ValueError for a user's mistake."""
    logdir, folder = decoder_flags.LOGDIR.value, decoder_flags.BUNDLE.value
    if logdir is None or folder is None:
        raise ValueError("give --logdir, a run, and --bundle, the folder to write; see --help.")
    if cli.processes():
        raise ValueError("one process exports a bundle; start it without the others.")

    with decoder_flags.opened_run() as run:
        run.export_bundle(folder)

    command = f"python -m lingvo_gshard.translate --bundle={folder} < in.txt > out.txt"
    print(f"Wrote {folder}: {command}")


def run() -> None:
    """The console entry."""
    cli.run("export_bundle", main)


if __name__ == "__main__":
    run()
