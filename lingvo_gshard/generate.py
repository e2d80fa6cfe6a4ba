"""Continues prompts with a language model: lines of standard input, one line for each, in order.

    gshard generate --logdir=RUN < prompts.txt > out.txt
    gshard generate --logdir=RUN --temperature=0.8 --top_p=0.95 --nbest=3 --seed=7
    gshard generate --bundle=DIR --input=prompts.txt --output=out.txt

A blank line is continued from the beginning of a document. --temperature draws samples, --nbest of
them from each prompt; without it, flat beam search finds the --nbest likeliest continuations. A
continuation begins with a space, unless it goes on with the prompt's last word:

    paste -d '' prompts.txt out.txt

--input is for long files, as for `gshard translate`.
"""

from absl import flags

from lingvo_gshard import cli, line_program

_SEED = flags.DEFINE_integer("seed", 0, "The seed of the samples.", 0, 2**31 - 1)
flags.adopt_module_key_flags(line_program)


def main() -> None:
    """Generates; raises ValueError for a user's mistake."""
    line_program.run("generate", seed=_SEED.value)


if __name__ == "__main__":
    cli.run("generate", main, unused=("attention", "source_lang"))
