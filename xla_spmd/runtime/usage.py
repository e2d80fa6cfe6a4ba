"""Texts on a program's command line: its help, and hints about a user's mistakes."""

import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from absl import flags

from xla_spmd.files import storage

_HELP = frozenset({"-h", "-?", "-help", "--help", "--helpfull", "--helpshort"})
# absl's additions to a flag's help: the values of an enum, and a note that it may be repeated.
_ADDED = re.compile(r"^<[^>]*>: |;\s+repeat this option to specify a list of values$")
_KINDS = {"string": "TEXT", "int": "N", "float": "X", "comma separated list of strings": "A,B"}
# A path that begins with `~`, perhaps after `NAME=`.
_HOME = re.compile(r"([^=~]*=|)(~[\w.-]*(?:/.*|))", re.DOTALL)
_WIDTH = 96
_INDENT = " " * 6


def asks_for_help(argv: Sequence[str]) -> bool:
    """Returns whether a flag asks for help."""
    options = itertools.takewhile(lambda word: word != "--", argv[1:])
    return not _HELP.isdisjoint(options)


def help_text(program: str, arguments: Sequence[str], unused: Collection[str]) -> str:
    """Returns the usage, the main module's docstring, and its flags with their defaults.

    `arguments` names the positional arguments, and `unused` the flags to omit.
    """
    usage = " ".join(["usage:", program, *arguments, "[FLAGS]"])
    lines = [usage, "", inspect.getdoc(sys.modules["__main__"]) or "", "", "flags:"]
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    for flag in sorted(own, key=lambda flag: flag.name):
        if flag.name not in unused:
            lines += _help_of(flag)
    return "\n".join([*lines, "  --verbosity=1", f"{_INDENT}Show the traceback of a mistake."])


def _help_of(flag: flags.Flag) -> list[str]:
    """Returns the lines about a flag: its name and values, then its help and default."""
    parser = flag.parser
    default = flag.default
    if flag.boolean:
        name = f"--[no]{flag.name}"
        default = str(default).lower()
    elif isinstance(parser, flags.EnumParser):
        name = f"--{flag.name}={'|'.join(parser.enum_values)}"
    elif isinstance(parser, flags.EnumClassParser):
        name = f"--{flag.name}={'|'.join(parser.member_names)}"
        default = default and default.name.lower()
    else:
        kind = flag.flag_type().removeprefix("multi ")
        name = f"--{flag.name}={_KINDS.get(kind, kind.upper())}"

    text = _ADDED.sub("", _ADDED.sub("", flag.help))
    if default is not None and default != []:
        text += f" (default: {default})"
    lines = textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return [f"  {name}", *lines]


def similar_flags(error: flags.Error) -> str | None:
    """Returns the flags that an unknown flag may mean; None if absl knows no similar ones."""
    names = re.search(r"Did you mean: (.*) \?", str(error))
    if not isinstance(error, flags.UnrecognizedFlagError) or names is None:
        return None
    similar = " or ".join(f"--{name}" for name in names[1].split(", "))
    return f"--{error.flagname} is not a flag of this program (did you mean {similar}?)"


def setting_hint(error: flags.Error, argv: Sequence[str]) -> str | None:
    """Returns how to give a setting, if an unknown flag of `argv` may be a setting; else None."""
    if not isinstance(error, flags.UnrecognizedFlagError) or "set" not in flags.FLAGS:
        return None
    # A path contains dots, which flags never contain.
    name = error.flagname
    if "." not in name:
        return (
            f"--{name} is not a flag; if it is a setting, `gshard settings MODEL {name}` finds its "
            "path, and --set=PATH=VALUE sets it"
        )
    value = "VALUE"
    for word, following in itertools.pairwise([*argv, ""]):
        flag, equals, given = word.lstrip("-").partition("=")
        if flag == name:
            value = given if equals else following or value
    return f"--{name} is a setting: write --set={name}={value}"


def expand_homes() -> None:
    """Replaces `~` by home folders in the values of flags, as a shell does for words.

    A value is a path, or contains one after `=`, as in --run=NAME=PATH and --set=PATH=VALUE.
    Raises ValueError, with the flag's name, if there is no such home folder.
    """
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        try:
            if isinstance(flag.value, str):
                flag.value = _expanded(flag.value)
            elif isinstance(flag.value, list):
                flag.value = [_expanded(item) for item in flag.value]
        except ValueError as error:
            raise ValueError(f"--{name}={error}") from error


def _expanded(value: object) -> Any:
    """Returns a flag's value, or an item of it, with a home folder instead of `~`."""
    if not isinstance(value, str):
        return value
    match = _HOME.fullmatch(value)
    return match[1] + storage.expanded(match[2]) if match else value


def check_not_empty() -> None:
    """Raises ValueError for a flag with an empty value, as of a variable that is not set.

    A folder without a name would be the current one.
    """
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if flag.present and flag.value == "":
            raise ValueError(f"--{name}= is empty; give it a value, or leave it out.")


def check_words(words: Sequence[str], arguments: Sequence[str]) -> None:
    """Raises ValueError if there are more positional arguments than the program takes."""
    if arguments and arguments[-1].endswith("..."):
        return
    unexpected = words[len(arguments) :]
    for word in unexpected:
        if word in ("<", ">", "|"):  # Quoted, or passed without a shell.
            raise ValueError(f"unexpected {word}: only a shell redirects; see --help.")
        if "=" in word:
            raise ValueError(f"unexpected {word}: a flag begins with --, as in --{word}.")
    if unexpected:
        raise ValueError(f"unexpected arguments {list(unexpected)}; see --help.")
