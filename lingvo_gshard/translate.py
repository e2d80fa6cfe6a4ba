"""Translates lines of standard input, one line for each, in order.

    gshard translate --logdir=RUN --source_lang=de < in.txt > out.txt
    gshard translate --bundle=DIR < in.txt > out.txt
    gshard translate --bundle=DIR --input=in.txt --output=out.txt

The target is English. If the data was prepared with other directions, --target_lang chooses it. A
model whose vocabulary has tokens of languages, such as NLLB, needs both languages:

    gshard translate --logdir=RUN --source_lang=deu_Latn --target_lang=fra_Latn

--input is for long files. OUTPUT.parts holds what is done, and the same command goes on from there
when it was stopped. In the end OUTPUT is written, over any earlier one. Several processes, with
flags as for the trainer, share the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard import cli, decoder_flags, line_program
from lingvo_gshard.line_program import Reader

if TYPE_CHECKING:
    from lingvo_gshard.decoding.languages import Languages
    from lingvo_gshard.decoding.text_decoder import TextDecoder

_TARGET_LANG = flags.DEFINE_string("target_lang", None, "The target, if a model has several.")
flags.adopt_module_key_flags(line_program)


def main() -> None:
    """Translates; raises ValueError for a user's mistake."""
    line_program.run("translate", _reader, _beginning)


def _beginning(languages: Languages) -> str:
    """Returns the text that all lines begin with; raises ValueError for an unknown language."""
    return languages.beginning(_TARGET_LANG.value, decoder_flags.SOURCE_LANG.value)


def _reader(text_decoder: TextDecoder) -> Reader:
    beginning = _beginning(text_decoder.spec.spoken)
    return Reader(text_decoder, lambda line: beginning + line)


if __name__ == "__main__":
    cli.run("translate", main, unused=("attention", "max_prompt_len"))
