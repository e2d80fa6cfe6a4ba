"""Letters for the dims of a program's arguments: the user's, and proposed ones.

A user's table of patterns is like Keras' LayoutMap and t5x' rules: `.*mlp/wi=M H` gives the dims of
all arguments whose path has `mlp/wi` the letters M and H. A letter may be a word; `_` is a dim that
is never split. Other dims get their letters from the dims that they meet in the program; see dims/.
"""

import collections
import dataclasses
import string
from collections.abc import Iterator, Mapping, Sequence

from xla_plan.program import patterns
from xla_plan.program.argument_paths import path, steps
from xla_plan.program.dims import reader
from xla_plan.program.dims.dim_sets import Dim, Dims
from xla_plan.program.dims.reader import Reading
from xla_plan.program.stablehlo_program import Argument, StablehloProgram
from xla_spmd.hlo.hlo_module import num_bytes

NONE = "_"  # A dim that is never split.
_BATCH = "B"  # The letter of the batch's dim if the user gives it none.


@dataclasses.dataclass(frozen=True, eq=False)
class Letters:
    """The letters of a program's dims."""

    reading: Reading
    arguments: tuple[tuple[str, ...], ...]  # The letters of each argument's dims.
    sizes: dict[str, int]
    batch: str | None  # The letter of the batch's dim; None without letters.
    of_dim: dict[Dim, str]  # The letter of each set, by its representative dim.

    def of(self, dims: Dims) -> tuple[str, ...]:
        """Returns the letters of any tensor of the program; a dim without a letter has `_`."""
        return tuple(self.of_dim.get(self.reading.sets.find(dim), NONE) for dim in dims)


def read(program: StablehloProgram, texts: Sequence[str]) -> Letters:
    """Returns the letters of a program; `texts`, of the form `REGEX=LETTERS`, give some of them.

    Raises ValueError for a malformed text, a pattern that matches no argument, two patterns that
    give one argument different letters, a wrong number of letters, a letter for dims of several
    sizes, or if no dim can have a letter.
    """
    given = _given(program, texts)
    known = []
    for letters in given:
        known.append(tuple(None if letter == NONE else letter for letter in letters or ()))
    arguments = _proposed(program, reader.read(program, known))
    for index, letters in enumerate(given):
        if letters is not None:
            arguments[index] = letters

    # Every dim now has a letter. Dims named `_` stay separate from the named ones.
    reading = reader.read(program, arguments)
    sizes: dict[str, int] = {}
    for argument, letters in zip(program.arguments, arguments, strict=True):
        for letter, size in zip(letters, argument.array.shape, strict=True):
            if letter != NONE:
                sizes.setdefault(letter, size)
    if not sizes:
        raise ValueError(
            f"program {program.name}: no dim of its arguments can have a letter, so that there is "
            "nothing to split; give some by --letters."
        )

    of_dim = {}
    for dim in range(len(reading.sets.sizes)):
        own = reading.sets.letter(dim)
        if own is not None:
            of_dim[reading.sets.find(dim)] = own
    batch = _batch(program, reading, arguments, of_dim)
    return Letters(reading, tuple(arguments), sizes, batch, _with_parts(reading, of_dim))


def _given(program: StablehloProgram, texts: Sequence[str]) -> list[tuple[str, ...] | None]:
    """Returns the user's letters of each argument, or None. `read` lists the errors."""
    given: list[tuple[str, ...] | None] = [None] * len(program.arguments)
    by: dict[int, str] = {}
    for text in texts:
        expression, letters = patterns.parse_letters(text)
        is_found = False
        for index, argument in enumerate(program.arguments):
            if not any(map(expression.search, (path(argument.name), argument.name))):
                continue
            is_found = True
            if given[index] not in (None, letters):
                raise ValueError(
                    f"--letters: {path(argument.name)} has different letters, by {by[index]!r} and "
                    f"{text!r}."
                )
            _check_rank(text, letters, argument)
            given[index] = letters
            by[index] = text

        if not is_found:
            examples = ", ".join(path(argument.name) for argument in program.arguments[:3])
            raise ValueError(
                f"--letters={text}: found in none of {len(given)} arguments, such as {examples}."
            )
    _check_sizes(program.arguments, given)
    return given


def _check_rank(text: str, letters: tuple[str, ...], argument: Argument) -> None:
    rank = len(argument.array.shape)
    if len(letters) != rank:
        raise ValueError(
            f"--letters={text}: {len(letters)} letters for {path(argument.name)}, which is "
            f"{argument.array} and has {rank} dims."
        )


def _check_sizes(arguments: Sequence[Argument], given: Sequence[tuple[str, ...] | None]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for argument, letters in zip(arguments, given, strict=True):
        for letter, size in zip(letters or (), argument.array.shape, strict=False):
            if letter == NONE:
                continue
            other, name = first.setdefault(letter, (size, path(argument.name)))
            if other != size:
                raise ValueError(
                    f"--letters: {letter} is {other} in {name} and {size} in {path(argument.name)}."
                )


def _unite_layers(program: StablehloProgram, reading: Reading) -> None:
    """Unites the dims of layers: of arguments whose paths differ only in numbers.

    In a stack such as a perceptron, a layer's output dim is the next layer's input dim. If all
    layers are alike, both dims of a weight would be one, so such layers are kept apart.
    """
    groups = collections.defaultdict[object, list[Dims]](list)
    for argument, dims in zip(program.arguments, reading.arguments, strict=True):
        groups[steps(argument.name), argument.array].append(dims)

    sets = reading.sets
    for members in groups.values():
        at_place = [set(map(sets.find, dims)) for dims in zip(*members, strict=True)]
        if len(set().union(*at_place)) == sum(map(len, at_place)):
            for dims in members[1:]:
                for a, b in zip(members[0], dims, strict=True):
                    sets.unite(a, b)


def _proposed(program: StablehloProgram, reading: Reading) -> list[tuple[str, ...]]:
    """Returns letters of all arguments' dims, with new letters for the unnamed dims.

    Three kinds of dims get no letter: dims of one element; dims over which loops iterate, as a
    device would need the other devices' parts; and the rows of a lookup table, as the looked-up
    rows, and all later tensors, would be split like the table instead of along the batch.
    """
    _unite_layers(program, reading)
    sets = reading.sets
    roots = list(dict.fromkeys(sets.find(dim) for dims in reading.arguments for dim in dims))
    of_dim: dict[Dim, str] = {}
    missing = []
    for root in roots:
        letter = sets.letter(root)
        if letter is not None:
            of_dim[root] = letter
        elif sets.sizes[root] > 1 and root not in reading.sequential:
            missing.append(root)

    # The batch is B. The other dims get letters alphabetically, in the order of the arguments.
    names = _free_names({*of_dim.values(), _BATCH})
    arguments = [tuple(str(sets.find(dim)) for dim in dims) for dims in reading.arguments]
    unnamed = {root: str(root) for root in roots if root in missing or root in of_dim}
    batch = _batch(program, reading, arguments, unnamed)
    for root in missing:
        is_batch = unnamed[root] == batch and _BATCH not in of_dim.values()
        of_dim[root] = _BATCH if is_batch else next(names)

    rows_by_table = {}
    for dims, rows in reading.tables:
        rows_by_table[tuple(map(sets.find, dims))] = rows
    proposed = []
    for dims in reading.arguments:
        own = tuple(map(sets.find, dims))
        rows = rows_by_table.get(own, frozenset())
        letters = [of_dim.get(root, NONE) for root in own]
        proposed.append(tuple(NONE if i in rows else name for i, name in enumerate(letters)))
    return proposed


def _free_names(taken: set[str]) -> Iterator[str]:
    number = 0
    while True:
        for letter in string.ascii_uppercase:
            name = f"{letter}{number}" if number else letter
            if name not in taken:
                yield name
        number += 1


def _batch(
    program: StablehloProgram,
    reading: Reading,
    arguments: Sequence[Sequence[str]],
    of_dim: Mapping[Dim, str],
) -> str | None:
    """Returns the letter of the batch: the letter whose products have the most flops.

    It is not a letter of the state (the donated arguments), if there are other letters. Among equal
    ones, it is the letter that the fewest arguments have, and then the first dim's: a sequence's
    letter is in all products, too.
    """
    flops = collections.defaultdict[str, float](float)
    for operation in reading.operations:
        dims = {reading.sets.find(dim) for dim in (*sum(operation.operands, ()), *operation.result)}
        for letter in {of_dim[dim] for dim in dims if dim in of_dim}:
            flops[letter] += operation.flops * operation.times

    place: dict[str, int] = {}
    num_arguments = collections.Counter[str]()
    of_state = set()
    known = set(of_dim.values())
    for argument, letters in zip(program.arguments, arguments, strict=True):
        num_arguments.update(set(letters))
        for index, letter in enumerate(letters):
            if letter in known and letter != NONE:
                place[letter] = min(index, place.get(letter, index))
                if argument.is_donated:
                    of_state.add(letter)
    if not place:
        return None

    def rank(letter: str) -> tuple[bool, float, int, int]:
        is_data = letter not in of_state
        return is_data, flops[letter], -num_arguments[letter], -place[letter]

    return max(place, key=rank)


def _with_parts(reading: Reading, of_dim: Mapping[Dim, str]) -> dict[Dim, str]:
    """Returns the letters, extended to the parts of dims that a reshape splits or merges.

    The part that varies slowest is split like the whole: heads like their merged dim, and a batch
    of rows like the merged dim of rows and positions.
    """
    letters = dict(of_dim)
    is_done = False
    while not is_done:
        is_done = True
        for whole, part in reading.heads.items():
            whole_root = reading.sets.find(whole)
            head = reading.sets.find(part)
            if whole_root in letters and head not in letters:
                letters[head] = letters[whole_root]
                is_done = False
            elif head in letters and whole_root not in letters:
                letters[whole_root] = letters[head]
                is_done = False
    return letters


def bytes_by_letter(program: StablehloProgram, letters: Letters) -> dict[str, int]:
    """Returns the bytes of all arguments that have each letter."""
    sums = dict.fromkeys(letters.sizes, 0)
    for argument, names in zip(program.arguments, letters.arguments, strict=True):
        for letter in set(names) - {NONE}:
            sums[letter] += num_bytes([argument.array])
    return sums
