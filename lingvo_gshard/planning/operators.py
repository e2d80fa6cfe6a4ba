"""Table 4 of the paper: what its operators compute and communicate, by today's compilers.

Each operator is compiled for several numbers of partitions D; its underlined dims grow with D and
all others stay. The partitions are JAX's own devices, or the cores of TPU v3 pods, which need not
be at hand. Letters are the table's.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import table
from lingvo_gshard.hlo.collectives import COLLECTIVES
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program

# Sizes per partition of dims that grow with D, and of those that don't.
_GROWING, _STAYING = 16, 32
_CAPACITIES, _KERNEL = 2048, 3  # Capacity x experts; rows and columns of a kernel.
# A measured power of D that is nearer than this to the paper's counts as equal.
_POWER_TOLERANCE = 0.25
# The first letters of the first and the last word, such as AA for all-to-all.
_ABBREVIATIONS = {kind: (kind[0] + kind.rpartition("-")[2][0]).upper() for kind in COLLECTIVES}
# The TPU compiler's option to gather operands of up to so many MiB in place of Figure 4c's loop.
_GATHERED: dict[str, str | bool] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@dataclasses.dataclass(frozen=True)
class Operator:
    """A row of Table 4. The last three fields are its columns, the latter two per partition."""

    name: str  # The name in the table, then the split dims.
    fn: Callable[..., tf.Tensor]  # The operator on full tensors.
    operands: tuple[str, ...]
    result: str
    # Of the dims of each operand and of the result, the first of these letters is split.
    split: str
    total_compute: str = "O(D)"
    compute: str = "O(1)"
    communication: str = "0"


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator and one compiler's programs of it, by the number of partitions D."""

    operator: Operator
    measured: Mapping[int, CompiledReport]

    @property
    def difference(self) -> str:
        """How the programs differ from the table; empty if they do not."""
        operator, measured, found = self.operator, self.measured, list[str]()
        expected = set(_ABBREVIATIONS.values()) & set(operator.communication.split())
        for d, report in measured.items():
            kinds = {_ABBREVIATIONS[op.kind] for op in report.collective_ops}
            if not kinds <= expected or bool(kinds) != bool(expected):
                found.append(f"{_communication(kinds, expected)} from D={d}")
                break
        first, last = measured[min(measured)], measured[max(measured)]
        growth = max(measured) / min(measured)
        # The table's O(sqrt(D)) for AllToAll is its time on a 2-D torus; its bytes are O(1).
        for name, value, column in (
            ("flops", lambda report: report.flops, operator.compute),
            ("bytes", communicated_bytes, operator.communication),
        ):
            expected_power = int(column.startswith("O(D)"))
            start, end = value(first), value(last)
            power = math.log(end / start, growth) if start and end else 0.0
            if abs(power - expected_power) > _POWER_TOLERANCE:
                found.append(f"{name} grow as D^{power:.2f}, not D^{expected_power}")
        return "; ".join(found)

    def __str__(self) -> str:
        """The paper's columns and the verdict, then each program's: one partition's."""
        paper = self.operator
        verdict = f"different: {self.difference}" if self.difference else "equal"
        cells = []
        for d, report in self.measured.items():
            sent = f"{communicated_bytes(report)} bytes"
            cells.append((f"D={d}", _collectives(report), f"{report.flops:.0f} flop", sent))
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
    # In TensorFlow's order of dims; the kernel's x and y are never split.
    Operator(
        "Convolution(BIXY,xyIO->BOXY) X",
        lambda x_BXYI, kernel_xyIO: tf.nn.conv2d(x_BXYI, kernel_xyIO, 1, "SAME"),
        ("BXYI", "__IO"),
        "BXYO",
        "X",
        communication="O(1) CP",
    ),
)


def lines() -> Iterator[str]:
    """Yields Table 4 on JAX's own devices and, if its compiler is installed, TPU v3; Figure 4c."""
    yield "On JAX's own devices"
    yield from map(str, rows(compile_program, (2, 4, 8)))
    if not topology.is_installed("v3"):
        yield "Without TPUs and Figure 4c; `make setup-tpu` installs their compiler."
        return
    yield "On TPU v3"
    yield from map(str, rows(compile_for_v3, (8, 16, 32, 64, 128, 256, 512, 1024, 2048)))
    yield "AG or CP (Figure 4c), operands of n x n on 8 cores of TPU v3: the loop needs less memory"
    yield figure_4c()


def figure_4c() -> str:
    """The table of both forms of Table 4's `AG or CP`, per partition, by the compiler for TPU v3.

    The compiler makes the loop where the operand to be gathered is large; an option gives the other
    form of it. Temporary is what is neither an argument nor the result.
    """
    cells = [["operator", "n", "form", "collectives", "sent MiB", "temporary MiB"]]
    for operator in (each for each in TABLE_4 if each.communication.endswith("AG or CP")):
        for n, options in ((8192, None), (16384, _GATHERED), (16384, None)):
            report = compile_for_v3(_export(operator, 8, n), options).report()
            form = "loop" if report.loops else "gathered"
            sizes = (communicated_bytes(report), report.temp_bytes)
            mib = [f"{size / 2**20:.0f}" for size in sizes]
            cells.append([operator.name, str(n), form, _collectives(report), *mib])
    return table.text(cells, indent="  ")


def rows(compile: Callable[[Program], Executable], partitions: Sequence[int]) -> list[Row]:
    """Table 4 measured with one compiler for several D. Raises ValueError as the compiler."""
    return [
        Row(operator, {d: compile(_export(operator, d)).report() for d in partitions})
        for operator in TABLE_4
    ]


def compile_for_v3(program: Program, options: dict[str, str | bool] | None = None) -> Executable:
    """Compiles for a TPU v3 with as many cores as the program has partitions."""
    cores = program.partitioning.mesh.num_partitions
    return topology.compile_program(program, topology.tpu("v3", cores), options)


def communicated_bytes(report: CompiledReport) -> int:
    """Bytes of the collectives' results, each as often as it runs."""
    return sum(each.result_bytes * each.times for each in report.collective_ops)


def _collectives(report: CompiledReport) -> str:
    """How many collectives of each kind run."""
    counts = collections.Counter[str]()
    for each in report.collective_ops:
        counts[_ABBREVIATIONS[each.kind]] += each.times
    return " ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def _export(operator: Operator, num_partitions: int, side: int | None = None) -> Program:
    """The operator on that many partitions; with `side`, every dim has this size."""
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), dict.fromkeys(operator.split, "d"))
    operands = NestedMap()
    for i, dims in enumerate(operator.operands):
        shape = tuple(side or _size(letter, operator, num_partitions) for letter in dims)
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
    if letter == "_":
        return _KERNEL
    return _GROWING * num_partitions if letter in operator.split else _STAYING


def _communication(found: set[str], expected: set[str]) -> str:
    if found == {"AR"} and "AG" in expected:
        return "gathers by AR, a sum of parts that are zero in each other's places,"
    used, allowed = "+".join(sorted(found)), "/".join(sorted(expected))
    return f"communicates by {used or 'nothing'}, not {allowed or 'nothing'},"
