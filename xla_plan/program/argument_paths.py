"""The paths of a program's arguments, and a few patterns that distinguish their labels.

JAX's name `state['params'][0]['wi']` is the path `state/params/0/wi`. Users' patterns match paths,
and the printed patterns, for users to paste, do as well.
"""

import re
from collections.abc import Iterator, Sequence

from xla_plan.program.stablehlo_program import StablehloProgram

# The steps from one node of a tree to the next in JAX's names: `['w']`, `[0]`, `.weight`.
_STEP = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]|\.(\w+)")


def path(name: str) -> str:
    """Returns an argument's name as a path: `state['params']['wi']` becomes `state/params/wi`."""
    return _STEP.sub(lambda step: "/" + next(filter(None, step.groups()), ""), name)


def steps(name: str) -> tuple[str, ...]:
    """Returns the steps of an argument's path as regular expressions, with any number for each."""
    return tuple(re.sub(r"\d+", r"\\d+", re.escape(step)) for step in path(name).split("/"))


def by_pattern(program: StablehloProgram, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the fewest patterns of whole paths that distinguish labels, each with its label.

    A pattern is a path's end, as long as needed, in which each number matches any number.
    """
    expressions = [steps(argument.name) for argument in program.arguments]
    yielded = set()
    for argument, own, label in zip(program.arguments, expressions, labels, strict=True):
        # Numbers matter only if arguments that differ in them have different labels.
        pattern = re.escape(path(argument.name))
        for count in range(1, len(own) + 1):
            if _labels_of(own[-count:], expressions, labels) == {label}:
                pattern = "/".join(own[-count:])
                if count < len(own):
                    pattern = f".*/{pattern}"
                break
        if pattern not in yielded:
            yielded.add(pattern)
            yield pattern, label


def _labels_of(
    end: tuple[str, ...], expressions: Sequence[tuple[str, ...]], labels: Sequence[str]
) -> set[str]:
    """Returns the labels of all paths that have this end."""
    pairs = zip(expressions, labels, strict=True)
    return {label for own, label in pairs if own[-len(end) :] == end}
