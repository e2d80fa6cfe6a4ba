"""Translates lines of standard input into English with a trained model, one line for each.

python -m lingvo_gshard.translate --logdir=RUN --source_lang=de < in.txt > out.txt
"""

from __future__ import annotations

import sys

from absl import flags

from lingvo_gshard import binary

_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.", required=True)
_SOURCE_LANG = flags.DEFINE_string(
    "source_lang", None, "The lines' language, one that the model was trained on.", required=True
)
_NUM_PARTITIONS = flags.DEFINE_integer("num_partitions", 1, "Devices to split the model over.")


def main(argv: list[str]) -> None:
    del argv
    # Loaded only now: TensorFlow and JAX read the environment when they are.
    from lingvo_gshard import runs
    from lingvo_gshard.decode.translator import Translator
    from lingvo_gshard.input.tokenizer import Tokenizer

    launch, facts = runs.recorded(_LOGDIR.value)
    runs.check_language(_SOURCE_LANG.value, facts)
    params = runs.experiment_params(launch, facts)
    estimator = runs.make_estimator(params, _LOGDIR.value, _NUM_PARTITIONS.value)
    source, target = (Tokenizer(path) for path in runs.vocabulary_files(_LOGDIR.value))
    translator = Translator(estimator, source, target, estimator.params.decode)
    # A line that is no UTF-8 is translated all the same, with marks where it can't be read.
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    # By newlines alone: splitlines() would also end a line at marks such as U+2028.
    lines = text.removesuffix("\n").split("\n") if text else []
    for translation in translator.translate(lines):
        print(translation.text)


def run() -> None:
    """The console entry."""
    binary.run("translate", main, _NUM_PARTITIONS)


if __name__ == "__main__":
    run()
