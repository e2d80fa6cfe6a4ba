"""XLA's text of a compiled program as records: computations of instructions.

A computation is a block of the text; instructions name those that they call.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)")
_OPCODE = re.compile(r" ?([\w-]+)\(")
_OPERAND = re.compile(r"%([\w.-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")  # Long tuples number their elements.
_PARENTHESIS = re.compile(r"[()]")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|branch_computations|true_computation|"
    r"false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in its computation.
      type: of its result, such as `f32[2,64]{1,0}`, or a tuple's in parentheses.
      opcode: such as `dot`.
      argument: what stands in its parentheses: operands, or a constant's or parameter's value.
      attributes: what follows, up to the metadata.
      metadata: the metadata and the back end's notes.
    """

    name: str
    type: str
    opcode: str
    argument: str
    attributes: str
    metadata: str

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        return tuple(_OPERAND.findall(self.argument))

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs."""
        found = _CALLED.findall(self.attributes)
        return tuple(name for names in found for name in re.findall(r"[\w.-]+", names))

    @property
    def op_name(self) -> str:
        """The operation that it was made of, in all scopes around it; empty where not told.

        Names of operations that the compiler made one are joined by semicolons.
        """
        found = _OP_NAME.search(self.metadata)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """The value of an attribute of one word, such as `index`; ValueError if it has none."""
        found = re.search(rf"\b{name}=%?([\w.-]+)", self.attributes)
        if found is None:
            raise ValueError(f"{self.opcode} {self.name} has no {name}, but {self.attributes!r}.")
        return found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A block of the text: its instructions by name, in its order, and which is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    """One partition's whole program.

    Attributes:
      computations: by name, in the text's order.
      entry: the name of the one that a call runs; empty where the text has none.
      num_partitions: how many partitions run it.
    """

    computations: dict[str, Computation]
    entry: str
    num_partitions: int


def parse(text: str) -> Module:
    """Reads a compiled program's text."""
    found = _PARTITIONS.search(text)
    computations, entry = {}, ""
    for is_entry, computation in _computations(text):
        computations[computation.name] = computation
        entry = computation.name if is_entry else entry
    return Module(computations, entry, int(found[1]) if found else 1)


def tuple_elements(tuple_type: str) -> list[str]:
    """The types in a tuple's type, whose layouts and inner tuples hold commas and brackets too."""
    elements, depth = [""], 0
    for char in tuple_type.strip()[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += char
    return elements


def array_types(type_text: str) -> list[str]:
    """The types of the arrays in a type: itself, or those of a tuple and the tuples in it."""
    if not type_text.startswith("("):
        return [type_text]
    elements = tuple_elements(_COMMENT.sub("", type_text))
    return [array for each in elements for array in array_types(each.strip())]


def _computations(text: str) -> Iterator[tuple[bool, Computation]]:
    """Each computation, and whether it is the entry."""
    name: str | None = None
    is_entry, root, instructions = False, "", dict[str, Instruction]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, is_entry, root, instructions = head["name"], bool(head["entry"]), "", {}
        elif name is not None and line.startswith("}"):
            yield is_entry, Computation(name, instructions, root or next(reversed(instructions)))
            name = None
        elif name is not None and (match := _INSTRUCTION.match(line)):
            instructions[match["name"]] = _instruction(match["name"], match["rest"])
            root = match["name"] if match["root"] else root


def _instruction(name: str, rest: str) -> Instruction:
    """Reads `type opcode(argument), attributes, metadata={...}, ...`."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(f"An instruction has no opcode after its type: {name} = {rest[:100]}")
    close = _closing(rest, opcode.end() - 1)
    attributes, mark, metadata = rest[close + 1 :].partition("metadata={")
    if not mark:
        attributes, mark, metadata = attributes.partition("backend_config=")
    return Instruction(
        name,
        rest[:end],
        opcode[1],
        rest[opcode.end() : close],
        attributes.strip(", "),
        mark + metadata,
    )


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"A parenthesis is not closed: {text[:100]}")
