"""The mesh: devices arranged along named axes (section 3.2, appendix A.3)."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from xla_spmd import checks

# The axis of a mesh that a dim is split along, or several axes, the slowest first.
Axis = str | tuple[str, ...]
# The axis of each dim of a tensor, or None for a whole dim.
Axes = Sequence[Axis | None]
# An axis in text, such as `experts:8` or `data:*`.
_AXIS = re.compile(r"([A-Za-z]\w*):([1-9]\d*|\*)")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Partitions arranged in a grid of named axes.

    `axis_sizes` are the numbers of partitions along the axes. `device_assignment` is the paper's,
    flattened: the device of each partition, in row-major order; None stands for 0, 1, 2, ... Raises
    ValueError if names and sizes don't match or the assignment is not a permutation.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_assignment: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.check_type("Mesh: axis_names", self.axis_names, (tuple, list), "names, ('d',)")
        checks.check_type("Mesh: axis_sizes", self.axis_sizes, (tuple, list), "sizes, (4,)")
        if len(self.axis_names) != len(self.axis_sizes):
            raise ValueError(
                f"Mesh: {len(self.axis_names)} axis names {self.axis_names} but "
                f"{len(self.axis_sizes)} sizes {self.axis_sizes}."
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"Mesh: axis names must differ, got {self.axis_names}.")
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            checks.check_count(f"Mesh: the partitions of axis {name!r}", size)

        assignment = self.device_assignment
        if assignment is not None and sorted(assignment) != list(range(self.num_partitions)):
            raise ValueError(
                f"Mesh: device_assignment must order 0 to {self.num_partitions - 1}, "
                f"got {assignment}."
            )

    @property
    def num_partitions(self) -> int:
        """The number of partitions, which equals the number of devices."""
        return math.prod(self.axis_sizes)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each partition, in row-major order."""
        return self.device_assignment or tuple(range(self.num_partitions))

    @property
    def grid(self) -> "Mesh":
        """This mesh without its device assignment, for annotations.

        A program numbers its partitions in the order of the grid. Which device each of them runs on
        is decided when the program is compiled, and must not be decided in annotations as well.
        """
        return Mesh(self.axis_names, self.axis_sizes)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis by name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def size(self, axis: Axis | None) -> int:
        """Returns the number of partitions along `axis`, 1 for None.

        Raises ValueError if it is not an axis, is unknown to the mesh, or has a name twice.
        """
        if not isinstance(axis, str | tuple | list | None):
            raise ValueError(f"Mesh: an axis is a name or a tuple of names, got {axis!r}.")
        names = names_of([axis])
        self.check("Mesh", names)
        return math.prod(self.shape[name] for name in names)

    def check(self, what: str, names: Sequence[str]) -> None:
        """Raises a ValueError, prefixed by `what`, if an axis is unknown or used twice."""
        problems = [f"no axis {name!r}" for name in names if name not in self.axis_names]
        problems += [f"an axis is used twice, {name!r}" for name in names if names.count(name) > 1]
        if problems:
            known = ", ".join(f"{name} of {size}" for name, size in self.shape.items())
            raise ValueError(f"{what}: {problems[0]} in {tuple(names)}; the axes are {known}.")

    @staticmethod
    def parse(
        text: str, num_partitions: int | None, assignment: Sequence[int] | None = None
    ) -> "Mesh":
        """Returns the mesh of a text such as `data:*,experts:8`: axes and sizes, the slowest first.

        A size of `*` is `num_partitions` divided by the other sizes; None stands for the fewest
        that the text allows. Raises ValueError if the text has another form, if the sizes do not
        multiply to `num_partitions`, if a name occurs twice, or if `assignment` is not a
        permutation of the devices.
        """
        matches = [_AXIS.fullmatch(axis.strip()) for axis in text.split(",")]
        names = tuple(match[1] for match in matches if match)
        sizes = [match[2] for match in matches if match]
        if len(sizes) < len(matches) or sizes.count("*") > 1:
            raise ValueError(
                f"mesh={text}: expected axes with their sizes, of which one may be the rest, such "
                "as data:*,experts:8."
            )

        # The axis of size `*`, if there is one, has the partitions that the others leave.
        known = math.prod(int(size) for size in sizes if size != "*")
        if num_partitions is None:
            num_partitions = known
        if num_partitions % known or ("*" not in sizes and num_partitions != known):
            expected = f"a multiple of {known}" if "*" in sizes else known
            raise ValueError(f"mesh={text}: expected {expected} devices, got {num_partitions}.")
        rest = num_partitions // known
        axis_sizes = tuple(rest if size == "*" else int(size) for size in sizes)
        device_assignment = None if assignment is None else tuple(assignment)
        return Mesh(names, axis_sizes, device_assignment)

    @staticmethod
    def flat(num_partitions: int) -> "Mesh":
        """Returns the paper's mesh: one axis, `d`, of all cores."""
        return Mesh(("d",), (num_partitions,))


def names_of(axes: Iterable[Axis | None]) -> list[str]:
    """Returns the names of all these axes, in order: ["y", None, ("x", "z")] gives y, x, z."""
    names: list[str] = []
    for axis in axes:
        if isinstance(axis, str):
            names.append(axis)
        elif axis is not None:
            names += axis
    return names
