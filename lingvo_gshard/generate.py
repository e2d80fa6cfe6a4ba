"""Continues prompts with a language model: lines of standard input, one line for each, in order.

    gshard generate --logdir=RUN < prompts.txt > out.txt
    gshard generate --logdir=RUN --temperature=0.8 --top_p=0.95 --nbest=3 --seed=7
    gshard generate --bundle=DIR --input=prompts.txt --output=out.txt

A blank line is continued from the beginning of a document. --temperature draws samples, --nbest of
them from each prompt; without it, flat beam search finds the --nbest likeliest continuations. A
continuation begins with a space, unless it goes on with the prompt's last word:

    paste -d '' prompts.txt out.txt

--prompt writes a text around each line. With --chat, this is a user's message to a model of chats,
and the output is the answer:

    gshard generate --logdir=RUN --chat --prompt="Translate into English:\\n\\n{line}" < in.txt

--input is for long files, as for `gshard translate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from absl import flags

from lingvo_gshard import cli, line_program
from lingvo_gshard.line_program import Reader

if TYPE_CHECKING:
    from lingvo_gshard.decoding.generator import Generator
    from lingvo_gshard.decoding.text_decoder import TextDecoder

_LINE = "{line}"
_PROMPT = flags.DEFINE_string(
    "prompt", _LINE, f"The prompt around each {_LINE}; \\n is a new line."
)
_CHAT = flags.DEFINE_bool("chat", False, "Whether a line is a message, for the chat template.")
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the samples.", 0, 2**31 - 1)
flags.adopt_module_key_flags(line_program)


def main() -> None:
    """Generates; raises ValueError for a user's mistake."""
    if _LINE not in _PROMPT.value:
        raise ValueError(f"--prompt={_PROMPT.value}: expected {_LINE} in it.")
    line_program.run("generate", _reader, seed=_SEED.value)


def _reader(text_decoder: TextDecoder) -> Reader:
    """Returns the model for prompts, or for chats of one message."""
    around = _PROMPT.value.replace("\\n", "\n")

    def prompt(line: str) -> str:
        return around.replace(_LINE, line)

    if not _CHAT.value:
        return Reader(text_decoder, prompt)

    generator = cast("Generator", text_decoder)

    def chat(line: str) -> str:
        return generator.chat([{"role": "user", "content": prompt(line)}])

    return Reader(generator.of_chats, chat)


if __name__ == "__main__":
    cli.run("generate", main, unused=("attention", "source_lang"))
