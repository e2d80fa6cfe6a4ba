"""Settings of an experiment as text: lists of settings, and TOML files.

A TOML file has the settings by group, and may name the model:

    model = "toy.MoE8E4L"

    [train]
    max_steps = 500
"""

import enum
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import Params, Setting

_MODEL = "model"  # The key of the model's name; settings have other names.


def as_texts(settings: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns `path=value` for each setting, in the form of --set.

    Raises ValueError if `settings` is not a dict by dotted path.
    """
    if settings is None:
        return ()
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"settings: expected a dict such as {{'train.max_steps': 500}}, got {settings!r}."
        )
    return tuple(f"{path}={_text(value)}" for path, value in settings.items())


def _text(value: Any) -> str:
    """Returns a text that hyperparams.parse_setting reads as the value."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        _, read = hyperparams.parse_setting(f"path={value}")
        return value if read == value else repr(value)  # '8' is a text, but 8 is a number.
    return repr(value)


def differences(ours: str, theirs: str, defaults: str = "") -> list[str]:
    """Returns the lines in which two ToText() differ, as `path: A, not B`, sorted by path.

    A setting that only `ours` has counts as absent in `theirs`, unless `defaults`, our
    DefaultsText(), lists it: then `theirs` is taken to have that default.
    """
    our_values = values_by_path(ours)
    their_values = values_by_path(defaults) | values_by_path(theirs)

    lines: list[str] = []
    for path in sorted(our_values.keys() | their_values.keys()):
        our_value = our_values.get(path, "absent")
        their_value = their_values.get(path, "absent")
        if our_value != their_value:
            lines.append(f"{path}: {our_value}, not {their_value}")
    return lines


def values_by_path(text: str) -> dict[str, str]:
    """Returns the values of a Params.ToText() by path."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        if line:
            path, value = line.split(" : ", 1)
            values[path] = value
    return values


def matching(params: Params, word: str | None) -> list[Setting]:
    """Returns the settings that have a word in their paths or descriptions; all without a word.

    If there is no such setting, it returns similar ones. Raises ValueError if none is similar.
    """
    settings = list(params.Settings())
    if word is None:
        return settings

    lowercase = word.lower()
    found = [s for s in settings if lowercase in f"{s.path} {s.description}".lower()]
    if not found:
        near = hyperparams.similar(params, word, count=12)
        found = [setting for setting in settings if setting.path in near]
    if not found:
        raise ValueError(f"no setting has {word!r} in its name or description.")
    return found


def listing(settings: Sequence[Setting]) -> str:
    """Returns two lines for each setting: its value, and its type and description."""
    lines = []
    for setting in settings:
        lines.append(f"{setting.path} = {shown(setting.value)}")
        lines.append(f"    {setting.kind}. {setting.description}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Returns a value in the form of --set."""
    return str(value) if value is None else _text(value)


def to_toml(params: Params, model: str) -> str:
    """Returns a TOML file of all settings, with their descriptions as comments.

    TOML cannot express None, so a setting of None is a comment, too.
    """
    # Settings without a group must come first.
    groups: dict[str, list[Setting]] = {"": []}
    for setting in params.Settings():
        group, _, _ = setting.path.rpartition(".")
        groups.setdefault(group, []).append(setting)

    lines = [f"{_MODEL} = {_toml(model)}"]
    for group, settings in groups.items():
        if group:
            lines += ["", f"[{group}]  # {settings[0].group}"]
        for setting in settings:
            _, _, name = setting.path.rpartition(".")
            lines.append(f"# {setting.kind}. {setting.description}")
            value = setting.value
            lines.append(f"# {name} =" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def from_toml(path: pathlib.Path) -> tuple[str | None, tuple[str, ...]]:
    """Returns the model that a TOML file names, or None, and its settings, `path=value`.

    Raises ValueError if the file does not exist, or is not TOML.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config={path}: there is no such file.") from None
    except IsADirectoryError:
        raise ValueError(f"--config={path}: this is a folder; expected a TOML file.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config={path}: expected a TOML file ({error}).") from error

    model = table.pop(_MODEL, None)
    if model is not None and not isinstance(model, str):
        raise ValueError(f"--config={path}: model: expected a name, got {model!r}.")
    return model, as_texts(dict(_leaves(table, "")))


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables by their dotted paths."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _toml(value: Any) -> str:
    """Returns a value in the syntax of TOML."""
    if isinstance(value, enum.Enum):
        return _toml(value.name)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        items = (f"{_toml(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, str | bool):
        # As in JSON, except that TOML escapes one more character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
