"""The tokens of NLLB's and M2M-100's tokenizers that their SentencePiece models lack.

A transformers folder names them in up to four files:

    tokenizer.json            `added_tokens`: each with its id and its flags
    tokenizer_config.json     `added_tokens_decoder`: the same; also the tokenizer's settings
    added_tokens.json         names and ids only
    special_tokens_map.json   `additional_special_tokens`: the languages in order, without ids

Three kinds of tokens follow the pieces: languages, <mask>, and tokens that a user added to the
tokenizer, which are cut out of the text before the model sees it. All other entries of the files
are compared with our own behavior; a difference is refused, or listed in `not_used`.
"""

import contextlib
import dataclasses
import pathlib
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields, some
from lingvo_gshard.input.tokenizer import LANGUAGE, language_code

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's special tokens, in the order of their ids.
M2M_PIECES = "vocab.json"
_MASK = "<mask>"
_UNUSED = re.compile(r"<unused \d+>|madeupword\d+")  # Rows that no tokenizer uses.

_FAST = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_MAP = "special_tokens_map.json"
FILES = (_FAST, _CONFIG, _ADDED, _MAP)
_LISTS = ("additional_special_tokens", "extra_special_tokens")

# The roles of special tokens, and their names in the released models.
_ROLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": _MASK,
}
_NEEDED_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_FLAGS = ("lstrip", "rstrip", "single_word")
_NOTHING = object()  # Equal to no JSON value.


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a folder."""

    names: tuple[str, ...]  # The tokens after the pieces, in the order of their ids.
    languages: tuple[str, ...]  # The languages among `names`.
    added: tuple[str, ...]  # A user's tokens: these texts are tokens wherever they occur.
    not_used: tuple[str, ...]  # The unused contents of the files, a line for each file.


@dataclasses.dataclass(frozen=True)
class _Token:
    """A token in a file."""

    name: str
    is_special: bool

    def __str__(self) -> str:
        return f"{self.name!r} ({'special' if self.is_special else 'text'})"


def read(folder: pathlib.Path, pieces: Sequence[str]) -> Tokens:
    """Returns the tokens of a folder, whose `pieces` have the ids from 0 on.

    Raises ValueError if a file is damaged, if files contradict each other or the pieces, or if the
    tokenizer's ids of a text differ from ours.
    """
    return _Reader(folder, pieces).tokens()


class _Reader:
    """Reads the files of one folder."""

    def __init__(self, folder: pathlib.Path, pieces: Sequence[str]) -> None:
        self._folder = folder
        self._pieces = pieces
        self._is_m2m = (folder / M2M_PIECES).is_file()
        self._files = {name: json_fields.read(folder / name) for name in FILES}
        self._noted: dict[str, list[str]] = {}  # The flags that we do not follow, by file.
        self._fast_model = Fields(folder / _FAST, {})

    def tokens(self) -> Tokens:
        """Returns the tokens; see `read`."""
        self._check_settings()
        listed = self._listed()
        by_id = self._by_id(listed)
        self._check_pieces(by_id)
        names = self._past_the_pieces(by_id, listed)
        self._check_fast_vocabulary([*self._pieces, *names])

        added = [token.name for token in by_id.values() if not token.is_special]
        languages: list[str] = []
        nameless: list[str] = []
        for name in names:
            if name in added or name == _MASK or _UNUSED.fullmatch(name):
                continue
            is_language = name in listed or LANGUAGE.fullmatch(name) is not None
            (languages if is_language else nameless).append(name)
        self._check_languages(languages)
        return Tokens(tuple(names), tuple(languages), tuple(added), self._not_used(nameless))

    # --- settings ---

    def _check_settings(self) -> None:
        """Raises ValueError if a setting would give text other ids."""
        nllb = ("NllbTokenizer", "NllbTokenizerFast")
        allowed: dict[str, tuple[Any, ...]] = {
            "tokenizer_class": ("M2M100Tokenizer",) if self._is_m2m else nllb,
            # True would put the language after the text.
            "legacy_behaviour": (False,),
            "language_codes": ("m2m100",),
            "sp_model_kwargs": ({},),
        }
        config = self._files[_CONFIG]
        for name, values in allowed.items():
            if name in config:
                self._check_setting(config, name, config.get(name), values)

        for fields in (config, self._files[_MAP]):
            for role, expected in _ROLES.items():
                if role in fields:
                    token = fields.get(role)
                    with _as_written(fields.path):
                        content = None if token is None else _content(token)
                        self._note_flags(fields, token, is_special=True)
                    self._check_setting(fields, role, content, (expected,))

    def _check_setting(self, fields: Fields, name: str, value: Any, allowed: Sequence[Any]) -> None:
        """Raises ValueError if a setting has another value; a null is noted."""
        if value is None and name not in _NEEDED_ROLES:
            self._note(fields, name)
        elif value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(
                f"{fields.path}: {name} is {reprlib.repr(value)}; expected {expected}: text would "
                "get other ids"
            )

    def _note(self, fields: Fields, what: str) -> None:
        self._noted.setdefault(fields.path.name, []).append(what)

    def _listed(self) -> list[str]:
        """Returns the special tokens that do not have a role, in order."""
        listed: list[str] = []
        for fields in (self._files[_MAP], self._files[_CONFIG]):
            in_file: list[str] = []
            for field in _LISTS:
                with _as_written(fields.path):
                    for token in _list(fields.get(field)):
                        in_file.append(_content(token))
                        self._note_flags(fields, token, is_special=True)
            if listed and in_file and set(listed) != set(in_file):
                raise ValueError(
                    f"{self._files[_MAP].path} and {fields.path} list different special tokens: "
                    f"{some(set(listed) ^ set(in_file))}"
                )
            listed = listed or in_file
        return listed

    # --- tokens and their ids ---

    def _by_id(self, listed: list[str]) -> dict[int, _Token]:
        """Returns the tokens by the ids that the files give them.

        Raises ValueError if two files contradict each other, or if one file lacks tokens after the
        pieces that another file has.
        """
        by_id: dict[int, _Token] = {}
        ids: dict[str, int] = {}
        listings: dict[pathlib.Path, set[int]] = {}
        for name in (_FAST, _CONFIG, _ADDED):
            fields = self._files[name]
            with _as_written(fields.path):
                in_file = self._ids(fields, listed)
            for token_id, token in in_file:
                known = by_id.setdefault(token_id, token)
                known_id = ids.setdefault(token.name, token_id)
                if token != known or token_id != known_id:
                    raise ValueError(
                        f"{fields.path}: token {token_id} is {token}; elsewhere in the folder it "
                        f"is {known}, and {token.name!r} has the id {known_id}"
                    )
            listings[fields.path] = {
                token_id for token_id, _ in in_file if token_id >= len(self._pieces)
            }

        # The tokens after the pieces; a file may list only the special tokens of text.
        for path, listing in listings.items():
            for token_id, token in by_id.items():
                is_missing = token_id >= len(self._pieces) and token_id not in listing
                if listing and is_missing and token.name != _MASK:
                    raise ValueError(
                        f"{path} lacks token {token_id}, {token.name!r}, which another file of "
                        "the folder has"
                    )
        return by_id

    def _ids(self, fields: Fields, listed: list[str]) -> list[tuple[int, _Token]]:
        """Returns the tokens in a file, with their ids."""
        always_special = {*SPECIAL, _MASK, *listed}
        tokens = []
        if fields.path.name == _ADDED:
            for name in fields.values:
                is_special = name in always_special or LANGUAGE.fullmatch(name) is not None
                tokens.append((_integer(fields.get(name)), _Token(name, is_special)))
            return tokens

        objects: list[tuple[int, Any]] = []
        if fields.path.name == _FAST:
            for token in _list(fields.get("added_tokens")):
                objects.append((_integer(token["id"]), token))
        else:
            for token_id, token in (fields.get("added_tokens_decoder") or {}).items():
                objects.append((int(token_id), token))

        for token_id, token in objects:
            name = _content(token)
            is_special = token["special"]
            if not isinstance(is_special, bool) or (name in always_special and not is_special):
                raise ValueError(f"special is {is_special!r} for {name!r}")
            self._note_flags(fields, token, is_special)
            tokens.append((token_id, _Token(name, is_special)))
        return tokens

    def _note_flags(self, fields: Fields, token: Any, is_special: bool) -> None:
        """Notes a token's flags that we do not follow.

        Raises ValueError if they would give text other ids.
        """
        if not isinstance(token, dict):
            return
        name = _content(token)
        expected: dict[str, Any] = dict.fromkeys(_FLAGS, False)
        expected |= {"normalized": not is_special, "special": is_special}
        expected |= {"content": name, "id": token.get("id")}
        for flag, value in sorted(token.items()):
            if value == expected.get(flag, _NOTHING):
                continue
            if flag in expected and not isinstance(value, bool):
                raise ValueError(f"{flag} is {value!r} for {name!r}; expected true or false")
            if flag in _FLAGS and not is_special:
                raise ValueError(f"{flag} is {value!r} for {name!r}; expected false")
            self._note(fields, f"{json_fields.shown(flag)} of {json_fields.shown(name)}")

    def _check_pieces(self, by_id: dict[int, _Token]) -> None:
        """Raises ValueError if a token has the id of another piece, or of a piece of text."""
        known_pieces = set(self._pieces)
        for token_id, token in by_id.items():
            if not token.name or token_id < 0:
                raise ValueError(f"{self._folder}: token {token_id} is {token.name!r}")
            if token_id >= len(self._pieces):
                if token.name in known_pieces:
                    raise ValueError(
                        f"{self._folder}: {token.name!r} is token {token_id}, and also a piece"
                    )
                continue

            piece = self._pieces[token_id]
            if piece != token.name:
                raise ValueError(
                    f"{self._folder}: token {token_id} is {token.name!r}, but piece {token_id} is "
                    f"{piece!r}: the tokenizer is of another size"
                )
            if token.is_special and piece not in SPECIAL:
                raise ValueError(
                    f"{self._folder}: {piece!r} is a piece of text; it must not be a special token"
                )

    def _past_the_pieces(self, by_id: dict[int, _Token], listed: list[str]) -> list[str]:
        """Returns the names of the tokens after the pieces, in the order of their ids."""
        first = len(self._pieces)
        names = {token_id: token.name for token_id, token in by_id.items() if token_id >= first}
        has_languages = any(name in listed or LANGUAGE.fullmatch(name) for name in names.values())
        if not has_languages:
            # Without ids, the order is fairseq's: <mask> comes last.
            in_order = listed if self._is_m2m else [*listed, _MASK]
            names = dict(enumerate(in_order, start=first)) | names

        expected = list(range(first, first + len(names)))
        if sorted(names) != expected:
            raise ValueError(
                f"{self._folder}: tokens of languages have ids {min(names)} to {max(names)}, but "
                f"the pieces end at {first - 1}: the tokenizer is of another size"
            )
        ordered = [names[token_id] for token_id in expected]
        missing = {*listed} - {*ordered, *SPECIAL}
        if missing or len({*ordered}) < len(ordered):
            raise ValueError(
                f"{self._folder}: tokens must have ids of their own, but these do not: "
                f"{some(missing or {name for name in ordered if ordered.count(name) > 1})}"
            )
        return ordered

    def _check_languages(self, languages: list[str]) -> None:
        """Raises ValueError if there are no languages, or if a line cannot begin with a name."""
        if not languages:
            raise ValueError(
                f"{self._folder}: no file lists the tokens of languages; expected one of "
                f"{', '.join(FILES)}"
            )
        codes: dict[str, str] = {}
        for name in languages:
            code = language_code(name)
            if not name or any(character.isspace() for character in name):
                raise ValueError(f"{self._folder}: language {name!r}: expected no white space")
            if codes.setdefault(code, name) != name:
                raise ValueError(
                    f"{self._folder}: {name} and {codes[code]} are both the language {code}"
                )

    def _check_fast_vocabulary(self, names: list[str]) -> None:
        """Raises ValueError if the pieces of tokenizer.json differ from the SentencePiece model."""
        fast = self._files[_FAST]
        with _as_written(fast.path):
            model = Fields(fast.path, fast.get("model") or {})
            vocabulary = model.get("vocab") or {}
            if isinstance(vocabulary, list):
                vocabulary = {name: token_id for token_id, (name, _) in enumerate(vocabulary)}
            for name, token_id in vocabulary.items():
                index = _integer(token_id)
                if not 0 <= index < len(names) or names[index] != name:
                    raise ValueError(f"piece {index} is {name!r}; the SentencePiece model differs")
        self._fast_model = model

    # --- the unused contents ---

    def _not_used(self, nameless: list[str]) -> tuple[str, ...]:
        """Returns a line for each file with fields or flags that we do not follow."""
        lines = []
        for name, fields in self._files.items():
            unread = [json_fields.shown(field) for field in fields.unread()]
            if name == _FAST:
                unread += [f"model.{json_fields.shown(f)}" for f in self._fast_model.unread()]
            if name in self._noted:
                unread.append(some(self._noted[name]))
            if unread:
                lines.append(f"{name}: {', '.join(unread)}")
        if nameless:
            lines.append(f"special tokens that are not languages: {some(nameless)}")
        return tuple(lines)


@contextlib.contextmanager
def _as_written(path: pathlib.Path) -> Iterator[None]:
    """Turns errors from unexpected types of values into a ValueError that names the file."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not in the format of transformers ({error!r})") from error


def _content(token: Any) -> str:
    """Returns the text of a token, which is a string or an object in a file."""
    content = token["content"] if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TypeError(f"a token is {content!r}")
    return content


def _list(value: Any) -> list[Any]:
    """Returns tokens that a file has in a list or by name. Raises TypeError for other values."""
    if not isinstance(value, list | dict | None):
        raise TypeError(f"tokens are {value!r}")
    return list(value.values()) if isinstance(value, dict) else value or []


def _integer(value: Any) -> int:
    """Returns an id. Raises TypeError if it is not an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"an id is {value!r}")
    return value
