"""Table 4 of the paper: the computation and communication of its operators, by today's compilers.

Each operator is compiled for several numbers of partitions D; its underlined dims grow with D, and
all other dims stay. The partitions are JAX's own devices, or the cores of TPU v3 pods, which need
not be attached. Letters are the table's.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.spmd.program import Program
from xla_plan.machines import topology
from xla_spmd.hlo.compiled_report import CompiledReport
from xla_spmd.hlo.hlo_module import COLLECTIVES
from xla_spmd.mesh import Mesh

# Sizes per partition of the dims that grow with D, and sizes of the other dims.
_GROWING = 16
_STAYING = 32
_CAPACITIES = 2048  # Capacity x experts.
_KERNEL = 3  # The rows and columns of a kernel.

# A measured power of D that is closer than this to the paper's counts as equal.
_POWER_TOLERANCE = 0.25

# The TPU compiler's option to gather operands of up to this many MiB instead of Figure 4c's loop.
_GATHERED: dict[str, str | bool] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@dataclasses.dataclass(frozen=True)
class Operator:
    """A row of Table 4. The last three fields are its columns, the last two per partition."""

    name: str  # The name in the table, followed by the split dims.
    fn: Callable[..., tf.Tensor]  # The operator on full tensors.
    operands: tuple[str, ...]
    result: str
    # In each operand and in the result, the first dim with one of these letters is split.
    split: str
    total_compute: str = "O(D)"
    compute: str = "O(1)"
    communication: str = "0"

    @property
    def expected_collectives(self) -> set[str]:
        """The abbreviations in the communication column."""
        abbreviations = {abbreviation(kind) for kind in COLLECTIVES}
        return abbreviations & set(self.communication.split())


@dataclasses.dataclass(frozen=True)
class OtherCollectives:
    """Collectives, abbreviated, that the table lacks, from a number of partitions on."""

    partitions: int
    used: set[str]
    expected: set[str]


@dataclasses.dataclass(frozen=True)
class OtherGrowth:
    """A partition's figure whose growth is a different power of D than in the table."""

    figure: str
    power: float
    expected_power: int


Difference = OtherCollectives | OtherGrowth


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator, and one compiler's programs for it, by the number of partitions D."""

    operator: Operator
    measured: Mapping[int, CompiledReport]

    @property
    def differences(self) -> list[Difference]:
        """The differences of the programs from the table; empty if they agree."""
        operator = self.operator
        differences = self._other_collectives()

        # The table's O(sqrt(D)) for AllToAll is its time on a 2-D torus; its bytes are O(1).
        flops = {d: report.flops for d, report in self.measured.items()}
        sent = {d: float(communicated_bytes(report)) for d, report in self.measured.items()}
        differences += _other_growth("flops", flops, operator.compute)
        differences += _other_growth("bytes", sent, operator.communication)
        return differences

    def _other_collectives(self) -> list[Difference]:
        """Returns the first program with collectives that the table lacks, if any."""
        expected = self.operator.expected_collectives
        for d, report in self.measured.items():
            used = {abbreviation(op.kind) for op in report.collective_ops}
            if not used <= expected or bool(used) != bool(expected):
                return [OtherCollectives(d, used, expected)]
        return []


def _other_growth(figure: str, values: Mapping[int, float], column: str) -> list[Difference]:
    """Returns the growth of a figure with D, unless it is its column's: O(D) or else O(1)."""
    # The power p of D, from the first and the last: last / first = (D_last / D_first)^p.
    fewest = min(values)
    most = max(values)
    power = 0.0
    if values[fewest] and values[most]:
        power = math.log(values[most] / values[fewest], most / fewest)

    expected_power = 1 if column.startswith("O(D)") else 0
    if abs(power - expected_power) > _POWER_TOLERANCE:
        return [OtherGrowth(figure, power, expected_power)]
    return []


@dataclasses.dataclass(frozen=True)
class WindowedEinsum:
    """A program of Figure 4c: a product whose operand is gathered, or passed on in a loop."""

    operator: Operator
    side: int  # n, for operands of n x n.
    report: CompiledReport

    @property
    def is_loop(self) -> bool:
        """Whether CollectivePermutes pass the operand around."""
        return bool(self.report.loops)


def _einsum(name: str, equation: str, split: str, *columns: str) -> Operator:
    def fn(*operands: tf.Tensor) -> tf.Tensor:
        return tf.einsum(equation, *operands)

    operands, result = equation.split("->")
    name = f"{name}({equation}) {','.join(split)}"
    return Operator(name, fn, tuple(operands.split(",")), result, split, *columns)


def _add(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.add(a, b)


def _reduce_rows(a_AB: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(a_AB, 1)


def _reduce_columns(a_AB: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(a_AB, 0)


def _convolution(x_BXYI: tf.Tensor, kernel_xyIO: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(x_BXYI, kernel_xyIO, 1, "SAME")


_matmul = functools.partial(_einsum, "Matmul", "AB,BC->AC")
_SUMMED = ("O(D)", "O(1)", "O(1) AR")
_UNMATCHED = ("O(D^2)", "O(D)", "O(D) AG or CP")
TABLE_4 = (
    Operator("Add(A,A->A) A", _add, ("A", "A"), "A", "A"),
    _matmul("B", *_SUMMED),
    _matmul("A"),
    _matmul("AB", *_UNMATCHED),
    _matmul("AC", *_UNMATCHED),
    Operator("Reduce(AB->A) A", _reduce_rows, ("AB",), "A", "A"),
    Operator("Reduce(AB->B) A", _reduce_columns, ("AB",), "B", "A", *_SUMMED),
    _einsum("Einsum", "GSEC,GSM->EGCM", "GE", "O(D)", "O(1)", "O(sqrt(D)) AA"),
    # Dims are in TensorFlow's order. The kernel's x and y are never split.
    Operator(
        name="Convolution(BIXY,xyIO->BOXY) X",
        fn=_convolution,
        operands=("BXYI", "__IO"),
        result="BXYO",
        split="X",
        communication="O(1) CP",
    ),
)


def measure(compile: Callable[[Program], Executable], partitions: Sequence[int]) -> list[Row]:
    """Measures Table 4 with one compiler for several D. An error of `compile` passes through."""
    rows = []
    for operator in TABLE_4:
        measured = {d: compile(_traced(operator, d)).report() for d in partitions}
        rows.append(Row(operator, measured))
    return rows


def figure_4c() -> Iterator[WindowedEinsum]:
    """Yields both forms of Table 4's `AG or CP`, by the compiler for 8 cores of TPU v3.

    The compiler makes the loop if the gathered operand is large; an option gives the other form.
    """
    for operator in TABLE_4:
        if operator.communication.endswith("AG or CP"):
            for side, options in ((8192, None), (16384, _GATHERED), (16384, None)):
                compiled = compile_for_v3(_traced(operator, 8, side), options)
                yield WindowedEinsum(operator, side, compiled.report())


def compile_for_v3(program: Program, options: dict[str, str | bool] | None = None) -> Executable:
    """Compiles for a TPU v3 with as many cores as the program has partitions."""
    cores = program.partitioning.mesh.num_partitions
    return topology_executable.compile_program(program, topology.tpu("v3", cores), options)


def communicated_bytes(report: CompiledReport) -> int:
    """Returns the bytes of all collectives' results, each times its number of runs."""
    return sum(op.result_bytes * op.times for op in report.collective_ops)


def collective_counts(report: CompiledReport) -> collections.Counter[str]:
    """Returns the number of runs of each kind of collective, abbreviated."""
    counts = collections.Counter[str]()
    for op in report.collective_ops:
        counts[abbreviation(op.kind)] += op.times
    return counts


def abbreviation(kind: str) -> str:
    """Returns the first letters of the first and the last word, for example AA for all-to-all."""
    words = kind.split("-")
    return (words[0][0] + words[-1][0]).upper()


def _traced(operator: Operator, num_partitions: int, side: int | None = None) -> Program:
    return tracer.traced(export, operator.name, num_partitions, side)


def export(name: str, num_partitions: int, side: int | None) -> Program:
    """Traces one of TABLE_4 on that many partitions; with `side`, every dim has this size."""
    (operator,) = (operator for operator in TABLE_4 if operator.name == name)

    # The table splits one dim of each operand. The first matching letter takes the mesh's axis.
    mesh = Mesh.flat(num_partitions)
    partitioning = Partitioning.from_dict(mesh, dict.fromkeys(operator.split, "d"))

    # As arguments of an annotated function, operands have names.
    operands = NestedMap()
    for i, dims in enumerate(operator.operands):
        shape = tuple(side or _size(letter, operator, num_partitions) for letter in dims)
        operands[f"x{i}"] = TensorSpec(shape, "float32", dims)

    def fn(operands: NestedMap) -> NestedMap:
        return NestedMap(y=operator.fn(*operands.Flatten()))

    annotated = AnnotatedFn("operator", fn, ("operands",), (operands,), {"y": operator.result})
    return lowering.export(annotated, partitioning)


def _size(letter: str, operator: Operator, num_partitions: int) -> int:
    """Returns the size of a dim of the whole operator."""
    if letter in "GE":  # Each partition has one group and one expert, as in section 3.1.
        return num_partitions
    if letter == "C" and "G" in operator.split:  # O(1/D), as the table's footnote says.
        return max(_CAPACITIES // num_partitions, 1)
    if letter == "_":
        return _KERNEL
    return _GROWING * num_partitions if letter in operator.split else _STAYING
