"""The files of a decoder's tokenizer: tokenizer.json, tokenizer_config.json, chat_template.jinja.

The template of chats is the file of its own or, without it, a field of tokenizer_config.json. There
it may be a list of templates by name, of which the one named default is ours.
"""

import dataclasses
import json
import pathlib

from lingvo_gshard.files import git_lfs, json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face.config import Config
from lingvo_gshard.input import bpe_tokenizer
from lingvo_gshard.input.bpe_tokenizer import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from lingvo_gshard.input.fairseq_vocabulary import Vocabulary

FILES = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE)
# The names of tokens in templates.
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class DecoderTokenizer:
    """A tokenizer's files."""

    path: pathlib.Path  # tokenizer.json.
    text: str
    special_tokens: dict[str, str] | None  # By names such as bos_token; None without a config.
    chat_template: str | None
    not_used: tuple[str, ...]

    @property
    def eos_id(self) -> int | None:
        """The id of its EOS, which ends a turn of a chat; None if it is not known."""
        eos = (self.special_tokens or {}).get("eos_token")
        try:
            added = json.loads(self.text)["added_tokens"]
            return next((token["id"] for token in added if token["content"] == eos), None)
        except (ValueError, TypeError, KeyError):  # `vocabulary` reports a damaged file.
            return None

    def vocabulary(self, config: Config) -> Vocabulary:
        """Returns the vocabulary of a model; raises ValueError if it does not fit the model."""
        try:
            content = bpe_tokenizer.vocabulary(
                self.text,
                config["vocab_size"],
                config.rows,
                self.special_tokens,
                self.chat_template,
            )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        return Vocabulary(content, self.not_used)


def read(folder: pathlib.Path) -> DecoderTokenizer | None:
    """Returns the tokenizer in a folder; None without a tokenizer.json.

    Raises ValueError if a file is damaged.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return None

    config = json_fields.read(folder / TOKENIZER_CONFIG)
    special_tokens = _special_tokens(config) if config.path.is_file() else None

    template: str | None
    not_used: list[str] = []
    template_path = folder / CHAT_TEMPLATE
    if template_path.is_file():
        template = _text(template_path)
    else:
        templates = _templates(config)
        template = templates.pop(_DEFAULT, None)
        if templates:
            not_used.append(f"chat templates: {', '.join(map(json_fields.shown, templates))}")

    not_used += json_fields.not_used(config)
    return DecoderTokenizer(path, _text(path), special_tokens, template, tuple(not_used))


def _text(path: pathlib.Path) -> str:
    """Returns the text of a file, with its own ends of lines."""
    git_lfs.check(path)
    try:
        return path.read_bytes().decode()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _special_tokens(config: Fields) -> dict[str, str]:
    """Returns the texts of the named tokens; the file has each as a text or as an object."""
    tokens = {}
    for prefix in _SPECIAL:
        name = f"{prefix}_token"
        match config.get(name):
            case None:
                continue
            case (str() as token) | {"content": str() as token}:
                tokens[name] = token
            case _:
                raise json_fields.refused(config, name, "a token")
    return tokens


def _templates(config: Fields) -> dict[str, str]:
    """Returns the templates of tokenizer_config.json by name."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}

    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        templates = {}
    texts = [*templates, *templates.values()]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise json_fields.refused(config, "chat_template", "a text, or a list of texts by name")
    return templates
