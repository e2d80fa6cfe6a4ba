"""Table 4 of the paper: what its operators compute and communicate, by today's compilers.

Each operator is compiled for several numbers of partitions D; its underlined dims grow with D and
all others stay. The partitions are JAX's own devices, or the cores of TPU v3 pods, which need not
be at hand. Letters are the table's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from lingvo_gshard.core import table
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, program, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program

# Sizes per partition of dims that grow with D, and of those that don't.
_GROWING, _STAYING = 16, 32
_CAPACITIES, _KERNEL = 2048, 3  # Capacity x experts; rows and columns of a kernel.
# A measured power of D that is nearer than this to the paper's counts as equal.
_POWER_TOLERANCE = 0.25

_ABBREVIATIONS = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "collective-permute": "CP",
    "all-to-all": "AA",
    "reduce-scatter": "RS",
    "ragged-all-to-all": "RA",
    "collective-broadcast": "CB",
}


@dataclasses.dataclass(frozen=True)
class Operator:
    """A row of Table 4. The last three fields are its columns, the latter two per partition.

    Attributes:
      name: the name in the table, then the split dims.
      fn: the operator on full tensors.
      operands, result: their dims. In each, the first letter that is in `split` is split.
    """

    name: str
    fn: Callable[..., tf.Tensor]
    operands: tuple[str, ...]
    result: str
    split: str
    total_compute: str = "O(D)"
    compute: str = "O(1)"
    communication: str = "0"


# By the number of partitions D, the topology that has so many, or `own` for JAX's own devices.
OWN_DEVICES = dict.fromkeys((2, 4, 8), "own")
TPU_V3 = {d: topology.v3(d) for d in (8, 16, 32, 64, 128, 256, 512, 1024, 2048)}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One partition of an operator, compiled for a TPU topology or for JAX's `own` devices.

    `collectives` are (kind, count) of those found; the bytes are those of their results.
    """

    num_partitions: int
    place: str
    collectives: tuple[tuple[str, int], ...]
    flops: float
    communicated_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator and one compiler's measurements of it, by growing numbers of partitions."""

    operator: Operator
    measured: Sequence[Measured]

    @property
    def difference(self) -> str:
        """How the measurements differ from the table; empty if they do not."""
        return "; ".join(_differences(self.operator, self.measured))

    def __str__(self) -> str:
        """The paper's columns and the verdict, then the measurements."""
        paper = self.operator
        verdict = f"different: {self.difference}" if self.difference else "equal"
        cells = []
        for each in self.measured:
            kinds = " ".join(f"{count} {_ABBREVIATIONS[kind]}" for kind, count in each.collectives)
            place = f"D={each.num_partitions} {each.place}"
            sent = f"{each.communicated_bytes} bytes"
            cells.append((place, kinds or "none", f"{each.flops:.0f} flop", sent))
        return (
            f"{paper.name}: total {paper.total_compute}, per partition {paper.compute}, "
            f"communication {paper.communication}: {verdict}\n{table.text(cells, indent='  ')}"
        )


def _einsum(name: str, equation: str, split: str, *columns: str) -> Operator:
    fn = functools.partial(tf.einsum, equation)
    inputs, result = equation.split("->")
    name = f"{name}({equation}) {','.join(split)}"
    return Operator(name, fn, tuple(inputs.split(",")), result, split, *columns)


_matmul = functools.partial(_einsum, "Matmul", "AB,BC->AC")
_SUMMED = ("O(D)", "O(1)", "O(1) AR")
_UNMATCHED = ("O(D^2)", "O(D)", "O(D) AG or CP")
TABLE_4 = (
    Operator("Add(A,A->A) A", lambda a, b: a + b, ("A", "A"), "A", "A"),
    _matmul("B", *_SUMMED),
    _matmul("A"),
    _matmul("AB", *_UNMATCHED),
    _matmul("AC", *_UNMATCHED),
    Operator("Reduce(AB->A) A", lambda a: tf.reduce_sum(a, 1), ("AB",), "A", "A"),
    Operator("Reduce(AB->B) A", lambda a: tf.reduce_sum(a, 0), ("AB",), "B", "A", *_SUMMED),
    _einsum("Einsum", "GSEC,GSM->EGCM", "GE", "O(D)", "O(1)", "O(sqrt(D)) AA"),
    # In TensorFlow's order of dims; x and y are the kernel's.
    Operator(
        "Convolution(BIXY,xyIO->BOXY) X",
        lambda x_BXYI, kernel_xyIO: tf.nn.conv2d(x_BXYI, kernel_xyIO, 1, "SAME"),
        ("BXYI", "xyIO"),
        "BXYO",
        "X",
        communication="O(1) CP",
    ),
)


def lines() -> Iterator[str]:
    """Yields Table 4 measured on JAX's own devices and, if its compiler is installed, TPU v3."""
    yield from map(str, rows(OWN_DEVICES))
    if topology.is_installed():
        yield from map(str, rows(TPU_V3))
    else:
        yield "Without TPUs, which `make setup-tpu` installs the compiler for."


def rows(places: Mapping[int, str]) -> list[Row]:
    """Table 4 measured at the places of one compiler, such as OWN_DEVICES.

    Raises ValueError if there are more partitions than devices, or as topology.compile_program.
    """
    return [
        Row(operator, [_measure(operator, *place) for place in places.items()])
        for operator in TABLE_4
    ]


def _measure(operator: Operator, num_partitions: int, place: str) -> Measured:
    exported = _export(operator, num_partitions)
    is_own = place == "own"
    compiled = compile_program(exported) if is_own else topology.compile_program(exported, place)
    report = compiled.report()
    found = tuple((kind, count) for kind, count in report.collectives if count)
    # No operator has a loop, so that each collective runs once.
    communicated_bytes = sum(each.result_bytes for each in report.collective_ops)
    return Measured(num_partitions, place, found, report.flops, communicated_bytes)


def _export(operator: Operator, num_partitions: int) -> program.Program:
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), dict.fromkeys(operator.split, "d"))
    operands = NestedMap()
    for i, dims in enumerate(operator.operands):
        shape = tuple(_size(letter, operator, num_partitions) for letter in dims)
        operands[f"x{i}"] = TensorSpec(shape, "float32", dims)

    def fn(operands: NestedMap) -> NestedMap:
        return NestedMap(y=operator.fn(*operands.Flatten()))

    annotated = AnnotatedFn("operator", fn, ("operands",), (operands,), {"y": operator.result})
    return lowering.export(annotated, parts)


def _size(letter: str, operator: Operator, num_partitions: int) -> int:
    if letter in "GE":  # One group and one expert per partition, as in section 3.1.
        return num_partitions
    if letter == "C" and "G" in operator.split:  # O(1/D), as the table's footnote says.
        return max(_CAPACITIES // num_partitions, 1)
    if letter in "xy":
        return _KERNEL
    return _GROWING * num_partitions if letter in operator.split else _STAYING


def _differences(operator: Operator, measured: Sequence[Measured]) -> Iterator[str]:
    """Yields how one compiler's programs differ from the table's row."""
    expected = set(_ABBREVIATIONS.values()) & set(operator.communication.split())
    for each in measured:
        found = {_ABBREVIATIONS[kind] for kind, _ in each.collectives}
        if not found <= expected or bool(found) != bool(expected):
            yield f"{_communication(found, expected)} from D={each.num_partitions}"
            break
    first, last = measured[0], measured[-1]
    growth = last.num_partitions / first.num_partitions
    # The table's O(sqrt(D)) for AllToAll is its time on a 2-D torus; its bytes are O(1).
    for name, start, end, column in (
        ("flops", first.flops, last.flops, operator.compute),
        ("bytes", first.communicated_bytes, last.communicated_bytes, operator.communication),
    ):
        expected_power = int(column.startswith("O(D)"))
        power = math.log(end / start, growth) if start and end else 0.0
        if abs(power - expected_power) > _POWER_TOLERANCE:
            yield f"{name} grow as D^{power:.2f}, not D^{expected_power}"


def _communication(found: set[str], expected: set[str]) -> str:
    if found == {"AR"} and "AG" in expected:
        return "gathers by AR, a sum of parts that are zero in each other's places,"
    used, allowed = "+".join(sorted(found)), "/".join(sorted(expected))
    return f"communicates by {used or 'nothing'}, not {allowed or 'nothing'},"
