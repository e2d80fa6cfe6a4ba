"""Finds turns of phrase at which a native reader stops, and prints a better form of each.

    python -m tools.check_prose [PATH ...]

The program reads the comments, docstrings, error messages and flag help of Python files, and the
paragraphs of Markdown files. Without arguments, it reads CLEAN, the folders and files that are
already free of these turns. The exit status is 1 if it finds one.

In the rare sentence that is right with a turn, an escape allows it. The escape names the turn after
the text: behind the comment, behind the closing quotes, or at the end of the paragraph.

    # The server answers what it is asked.  # prose: noun-what
    The server answers what it is asked. <!-- prose: noun-what -->
"""  # prose: noun-what

import argparse
import ast
import dataclasses
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]
CLEAN = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "bench",
    "data_prep",
    "docs",
    "launch",
    "lingvo_gshard/api",
    "lingvo_gshard/beam_search",
    "lingvo_gshard/core",
    "lingvo_gshard/decoding",
    "lingvo_gshard/evaluation",
    "lingvo_gshard/files",
    "lingvo_gshard/input",
    "lingvo_gshard/layers",
    "lingvo_gshard/optim",
    "lingvo_gshard/plans",
    "lingvo_gshard/serving",
    "lingvo_gshard/sharding",
    "lingvo_gshard/spmd",
    "lingvo_gshard/train",
    "params",
    "repro",
    "tests/beam_search",
    "tests/bench",
    "tests/core",
    "tests/data_prep",
    "tests/decoding",
    "tests/evaluation",
    "tests/files",
    "tests/input",
    "tests/layers",
    "tests/model",
    "tests/optim",
    "tests/params",
    "tests/plans",
    "tests/repro",
    "tests/serving",
    "tests/sharding",
    "tests/spmd",
    "tests/tools",
    "tests/train",
    "tests/xla_plan",
    "tests/xla_spmd/annotations",
    "tests/xla_spmd/compilers.py",
    "tests/xla_spmd/files",
    "tests/xla_spmd/hlo",
    "tests/xla_spmd/mesh_test.py",
    "tests/xla_spmd/repairs",
    "tests/xla_spmd/runtime",
    "tests/xla_spmd/stablehlo_test.py",
    "tools",
    "xla_spmd/annotations",
    "xla_spmd/files",
    "xla_spmd/hlo",
    "xla_spmd/repairs",
    "xla_spmd/runtime",
)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of phrase: the regular expression that finds it, an example, and a better form."""

    name: str
    pattern: str
    example: str
    better: str


TURNS = (
    Turn(
        "noun-what",
        r"\b[Ww]hat (?:is|are|was|were|has|have|had|it|they|one|can|may|must|will|comes?|remains?"
        r"|follows?|belongs?|matters|goes|differs?|limits?|does not|do not|would)\b(?![^.;]*\?)",
        "It prints what is left over, and drops what has no name.",
        "It prints the remaining files, and drops the unnamed ones.",
    ),
    Turn(
        "noun-that",
        r"\b(?:that of|those (?:of|that|which|in|on|with|without|for|from|by|whose))\b",
        "The dims are those of the weight, and the dtype is that of the batch.",
        "The result has the weight's dims and the batch's dtype.",
    ),
    Turn(
        "is-no",
        r"\b(?<!there )(?<!There )(?:is|are|was|were|be) no (?!longer|more|less|later|earlier)",
        "Raises ValueError if the value is no integer.",
        "Raises ValueError if the value is not an integer.",
    ),
    Turn(
        "has-none",
        r"\b(?:has|have|had|gets?|got|needs?|takes?|is|are|was|were) none\b",
        "The folder is written anew if it has none.",
        "The file is written if the folder lacks it.",
    ),
    Turn(
        "there-is-none",
        r"\b(?:if|where|when|while|unless|until|once) there (?:is|are) (?:one|none|any|some)"
        r"(?=[.,;:)]| *\Z)",
        "Returns the newest checkpoint; None if there is none.",
        "Returns the newest checkpoint, or None before the first save.",
    ),
    Turn(
        "raises-as",
        r"\b[Rr]aises? (?:\w+ )?as\b",
        "Raises ValueError as `load`.",
        "Raises ValueError if the file is missing or damaged.",
    ),
    Turn(
        "error-for",
        r"; \w*Error (?:for|if|when|where)\b",
        "Returns the number; ValueError for anything else.",
        "Returns the number. Raises ValueError if the text is not a number.",
    ),
    Turn(
        "as-it-lies",
        r"\bas (?:it|they) (?:lies?|stands?|comes?)\b",
        "Pairs are packed as they come.",
        "Pairs are packed in their order.",
    ),
    Turn(
        "lies",
        r"\b(?:lies|lay) (?!between)|\b(?:files?|arrays?|rows?|weights?|they) lie\b",
        "The log lies in the run's folder.",
        "The log is stored in the run's folder.",
    ),
    Turn(
        "tells",
        r"\b(?:tells?|told) (?:whether|which|what|how|where|why|that|of)\b",
        "A column tells which device was full.",
        "A column names the full device.",
    ),
    Turn(
        "of-first",
        r"(?:\A|[.;:] |  )Of (?:the|a|an|each|every|all|its|their|it|them|these|those|some)\b",
        "Of each row, the last token is cut.",
        "The last token of each row is cut.",
    ),
    Turn(
        "so-many",
        r"\b(?:of|in|by|about|after|for|than|with) so (?:many|much)\b",
        "The loop ends after so many steps.",
        "The loop ends after this number of steps.",
    ),
    Turn(
        "but-for",
        r"\b(?<!not )but for\b",
        "The models are equal but for their positions.",
        "The models are equal except for their positions.",
    ),
    Turn(
        "another-than",
        r"\banother (?:\w+ )?than\b|\bother (?!rather)\w+ than\b|\bsomething else than\b",
        "The file has another digest than the manifest.",
        "The file's digest differs from the manifest's.",
    ),
    Turn(
        "as-asked",
        r"\b(?:as|than|is|are|was|were) asked for\b",
        "The device has as many bytes as asked for.",
        "The device has the requested number of bytes.",
    ),
    Turn(
        "of-its-own",
        r"\b(?:a|an|no|any) \w+ of (?:its|their) own\b",
        "The compiler runs in a process of its own.",
        "The compiler runs in a separate process.",
    ),
    Turn(
        "whose-is",
        r"\bwhose (?:is|are|was|were)\b",
        "The arrays whose are the optimizer's are not read.",
        "The optimizer's arrays are not read.",
    ),
    Turn(
        "bare-as",
        r"(?:\A|[.;:] |  )As _+\.|\b[Aa]s (?:\w+|_+) (?:has|have) (?:it|them)\b",
        "As `load`. The command is as the manual has it.",
        "Reads a folder like `load`. The command is the manual's.",
    ),
    Turn(
        "goes-on",
        r"\b(?:goes|go|went) on (?:where|with|at|after|behind|from|as)\b",
        "A later run goes on where this one ended.",
        "A later run continues where this one ended.",
    ),
)

_NAMES = {turn.name for turn in TURNS}
_ESCAPE = re.compile(r"\s*(?:#|<!--) prose: ([\w, -]+?)(?: -->)?\s*\Z")


@dataclasses.dataclass(frozen=True)
class Text:
    """A text of stripped lines, without `#`; `line` is the number of its first line.

    `allowed` are the names of the turns that an escape after the text allows.
    """

    line: int
    text: str
    allowed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line with a turn, or with an escape that is wrong, and the message about it."""

    line: int
    message: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=pathlib.Path, help="Files or folders to read.")
    paths = parser.parse_args().paths or [ROOT / name for name in CLEAN]

    num_findings = 0
    for path in files(paths):
        for finding in findings(path.name, path.read_text(encoding="utf-8")):
            print(f"{path}:{finding.line}: {finding.message}")
            num_findings += 1
    sys.exit(1 if num_findings else 0)


def files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the Python and Markdown files among the paths and in their folders.

    Raises FileNotFoundError if a path does not exist.
    """
    found: list[pathlib.Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(each for each in path.rglob("*") if each.suffix in _READERS)
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path} does not exist.")
    return found


def findings(name: str, content: str) -> Iterator[Finding]:
    """Yields the findings in a file; the suffix of its name chooses its reader."""
    for text in _READERS[pathlib.PurePath(name).suffix](content):
        # Turns continue over line breaks, and code is not prose.
        prose = text.text.replace("\n", " ")
        prose = re.sub(r"`[^`]*`", lambda code: "_" * len(code[0]), prose)
        unused = set(text.allowed)
        for turn in TURNS:
            for match in re.finditer(turn.pattern, prose):
                if turn.name in text.allowed:
                    unused.discard(turn.name)
                    continue
                line = text.line + text.text.count("\n", 0, match.start())
                yield Finding(line, f"{turn.name}: {match[0]!r}. Rather: {turn.better!r}")
        for turn_name in sorted(unused):
            problem = "is not needed" if turn_name in _NAMES else "does not name a turn"
            yield Finding(text.line, f"the escape `prose: {turn_name}` {problem}")


# --- Readers ---


def _read_python(content: str) -> Iterator[Text]:
    """Yields the comments, docstrings, error messages and help of flags."""
    yield from _comments(content)

    lines = content.split("\n")
    for node in ast.walk(ast.parse(content)):
        strings: list[ast.expr] = []
        if isinstance(node, ast.Expr) and _is_string(node.value):
            strings = [node.value]
        elif isinstance(node, ast.Raise) and node.exc:
            strings = _strings(node.exc)
        elif isinstance(node, ast.Call) and "DEFINE_" in ast.unparse(node.func):
            strings = _strings(node)

        for string in strings:
            assert string.end_lineno is not None
            _, allowed = _without_escape(lines[string.end_lineno - 1])
            stripped = [line.strip() for line in _value(string).split("\n")]
            yield Text(string.lineno, "\n".join(stripped), allowed)


def _strings(node: ast.AST) -> list[ast.expr]:
    """Returns the strings and f-strings within an expression."""
    if isinstance(node, ast.JoinedStr) or _is_string(node):
        assert isinstance(node, ast.expr)
        return [node]
    return [text for child in ast.iter_child_nodes(node) for text in _strings(child)]


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _value(node: ast.expr) -> str:
    """Returns the value of a string or an f-string, in which each expression becomes `_`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_value(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "_"


def _comments(content: str) -> Iterator[Text]:
    """Yields the comments; comments on successive lines are one text."""
    block: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        is_alone = not token.line[:column].strip()
        if block and not (is_alone and line == begin + len(block)):
            yield _text(begin, block)
            block = []
        if not block:
            begin = line
        block.append(token.string.removeprefix("#").strip())
        if not is_alone:
            yield _text(begin, block)
            block = []
    if block:
        yield _text(begin, block)


def _read_markdown(content: str) -> Iterator[Text]:
    """Yields the paragraphs, list items and headings, without tables and blocks of code."""
    paragraph: list[str] = []
    begin = 0
    is_code = False
    for number, line in enumerate([*content.split("\n"), ""], 1):
        stripped = line.strip()
        is_item = stripped.startswith(("- ", "* ", "#"))
        is_fence = stripped.startswith("```")
        is_indented_code = line.startswith("    ") and not paragraph
        is_other = is_code or is_fence or is_indented_code or stripped.startswith("|")
        if is_fence:
            is_code = not is_code

        if paragraph and (is_item or is_other or not stripped):
            yield _text(begin, paragraph)
            paragraph = []
        if stripped and not is_other:
            begin = begin if paragraph else number
            paragraph.append(stripped.lstrip("-*# "))


def _text(line: int, lines: Sequence[str]) -> Text:
    text, allowed = _without_escape("\n".join(lines))
    return Text(line, text, allowed)


def _without_escape(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the text without the escape at its end, and the names of the escape's turns."""
    escape = _ESCAPE.search(text)
    if escape is None:
        return text, ()
    return text[: escape.start()], tuple(name.strip() for name in escape[1].split(","))


_READERS = {".py": _read_python, ".md": _read_markdown}


if __name__ == "__main__":
    main()
