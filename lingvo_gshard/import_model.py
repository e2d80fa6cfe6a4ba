"""Makes a run of a pretrained model that transformers wrote: NLLB-MoE, NLLB-200 or M2M-100.

    python -m lingvo_gshard.import_model --from=FOLDER --logdir=RUN
    python -m lingvo_gshard.translate --logdir=RUN --source_lang=deu_Latn --target_lang=fra_Latn

FOLDER is a copy of the model's repository: config.json, the weights in safetensors or in .bin
files, in one or in parts, and the tokenizer's files. The weights are copied part by part, so a
model may be larger than this machine's memory. If the process is killed, the same command
continues.
"""

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.files import storage
from lingvo_gshard.spmd import environment

_FROM = flags.DEFINE_string("from", None, "A folder of a model of transformers.", required=True)
_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of the new run.", required=True)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")


def main() -> None:
    """Imports the model; raises ValueError for a user's mistake."""
    # A part at a time is hashed, which needs no accelerator.
    environment.prepare(1, "cpu")
    from lingvo_gshard.hugging_face import importing

    with storage.working(_FROM.value) as folder, storage.working(_LOGDIR.value) as logdir:
        done = importing.import_folder(folder, logdir, tuple(_SET.value))

    continued = f", of which {done.num_continued} were there" if done.num_continued else ""
    print(
        f"{done.model}: {done.num_weights:,} weights from {done.num_tensor_bytes / 1e9:.2f} GB in "
        f"{done.secs:.1f} s; {done.num_arrays} arrays{continued}. Wrote {_LOGDIR.value}."
    )
    if not done.has_vocabulary:
        print(f"{_FROM.value} has no tokenizer (sentencepiece.bpe.model): it cannot translate.")


def run() -> None:
    """Runs `main` with the flags of the command line."""
    cli.run("import_model", main)


if __name__ == "__main__":
    run()
