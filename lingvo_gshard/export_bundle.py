"""Exports a trained model as a bundle: a folder that decodes without TensorFlow or the run.

    gshard export --logdir=RUN --bundle=DIR --num_partitions=2
    gshard translate --bundle=DIR < in.txt > out.txt

A language model's bundle is for `gshard generate`, and `gshard serve` serves both.

A bundle holds programs, weights, vocabularies and the code that runs them. Its number of devices
and its beam are fixed. JAX promises to read its programs for six months after the release that
wrote them. A newer release makes them again from the bundle itself:

    gshard export --from_bundle=DIR --bundle=NEW

With --weights=BFLOAT16 or --weights=INT8 a bundle has half or a quarter of the size, on the disk
and in the memory of the process that decodes:

    gshard export --logdir=RUN --bundle=DIR --weights=INT8

For TensorFlow Serving and programs that have TensorFlow alone, it writes a SavedModel in place of a
bundle, of a model that translates. It takes text and gives text, on one device, and needs the extra
`saved-model`:

    gshard export --logdir=RUN --export_saved_model=DIR
    gshard export --from_bundle=BUNDLE --export_saved_model=DIR

For transformers, it writes the weights of a run, a config.json and a tokenizer's files:

    gshard export --logdir=RUN --to=huggingface --out=DIR
"""

import shlex

from absl import flags

from lingvo_gshard import cli, decoder_flags
from xla_spmd.files import atomic_file, storage
from xla_spmd.runtime import environment

_FROM_BUNDLE = flags.DEFINE_string("from_bundle", None, "An older bundle, in place of --logdir.")
_SAVED_MODEL = flags.DEFINE_string(
    "export_saved_model", None, "A folder for a TensorFlow SavedModel, in place of --bundle."
)
_TO = flags.DEFINE_enum("to", "bundle", ["bundle", "huggingface"], "What to write.")
_OUT = flags.DEFINE_string("out", None, "The folder to write, with --to=huggingface.")
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)


def main() -> None:
    """Writes the bundle; raises ValueError for a user's mistake."""
    if _TO.value == "huggingface" or _OUT.value is not None:
        _write_hugging_face()
        return

    # One source, a run or an older bundle, and one folder to write.
    logdir = decoder_flags.LOGDIR.value
    older = _FROM_BUNDLE.value
    folder = decoder_flags.BUNDLE.value
    saved_model = _SAVED_MODEL.value
    if (folder is None) == (saved_model is None) or (logdir is None) == (older is None):
        raise ValueError(
            "give --bundle, the folder to write, and either --logdir, a run, or --from_bundle, an "
            "older bundle; --export_saved_model may take the place of --bundle; see --help."
        )
    if cli.processes():
        raise ValueError("one process exports a bundle; start it without the others.")

    if saved_model is not None:
        _write_saved_model(saved_model, older)
        print(f"Wrote {saved_model}: tf.saved_model.load reads it after `import tensorflow_text`.")
        return

    assert folder is not None
    from lingvo_gshard.decoding import bundle_spec

    # Before the devices start, or the weights are read.
    storage.check_writable(folder)
    if not storage.is_bucket(folder):
        bundle_spec.check_folder(folder)
    if older is not None:
        decoder_flags.check_needs_run()
        _prepare_for(older)
        from lingvo_gshard.runs.run import export_again

        export_again(older, folder)
    else:
        with decoder_flags.opened_run() as run:
            run.export_bundle(folder)

    program = bundle_spec.load_spec(folder).reading.command
    command = f"gshard {program} --bundle={shlex.quote(folder)} < in.txt > out.txt"
    print(f"Wrote {folder}: {command}")


def _write_saved_model(folder: str, older: str | None) -> None:
    """Writes a SavedModel of the bundle `older`, or of the run of --logdir."""
    if decoder_flags.ATTENTION.value:
        raise ValueError("--attention is for bundles; a SavedModel does not return it.")
    from lingvo_gshard.decoding import bundle_spec
    from lingvo_gshard.runs import saved_model_request

    saved_model_request.check_installed()
    storage.check_writable(folder)
    if not storage.is_bucket(folder):
        saved_model_request.check_folder(folder)

    if older is not None:
        saved_model_request.check_languages(bundle_spec.load_spec(older).spoken)
        _prepare_for(older)
        from lingvo_gshard.runs.run import export_saved_model_of

        export_saved_model_of(older, folder)
    else:
        with decoder_flags.opened_run(None, saved_model_request.check_languages) as run:
            run.export_saved_model(folder)


def _write_hugging_face() -> None:
    """Writes a model of transformers with the weights of the run of --logdir."""
    folder = _OUT.value
    others = (_FROM_BUNDLE.value, _SAVED_MODEL.value, decoder_flags.BUNDLE.value)
    has_others = any(value is not None for value in others)
    if _TO.value != "huggingface" or folder is None or has_others:
        raise ValueError("--to=huggingface needs --logdir and --out, and no other folder.")
    if decoder_flags.LOGDIR.value is None:
        raise ValueError("--to=huggingface needs --logdir, a run.")
    if cli.processes():
        raise ValueError("one process exports a model; start it without the others.")
    storage.check_writable(folder)
    if not storage.is_bucket(folder):
        atomic_file.check_holds_only(folder, (), "the exported model")

    with decoder_flags.opened_run() as run:
        from lingvo_gshard.hugging_face import exporting

        notes = exporting.export_folder(run, folder)
    print("\n".join([f"Wrote {folder}: from_pretrained loads it.", *notes]))


def _prepare_for(older: str) -> None:
    """Prepares the devices that a bundle is for."""
    from lingvo_gshard.decoding import bundle_spec

    # Nothing is computed, so CPU devices may stand for them.
    environment.prepare(bundle_spec.load_spec(older).num_partitions, "cpu")


if __name__ == "__main__":
    cli.run("export_bundle", main, unused=cli.OF_PROCESSES)
