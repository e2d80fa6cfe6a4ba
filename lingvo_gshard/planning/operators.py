"""Table 4 of the paper: what its operators compute and communicate, by today's compiler.

Each operator is compiled for several numbers of partitions D; its underlined dims grow with D and
all others stay. The partitions are JAX's own devices, or the cores of TPU v3 pods, which need not
be at hand. Letters are the table's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

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
    """A row of Table 4.

    Attributes:
      name: the name in the table, then the split dims.
      fn: the operator on full tensors.
      operands, result: their dims. In each, the first letter that is in `split` is split.
      split: the letters over the partitions.
      total_compute, compute, communication: the table's columns, the latter two per partition.
    """

    name: str
    fn: Callable[..., tf.Tensor]
    operands: tuple[str, ...]
    result: str
    split: str
    total_compute: str = "O(D)"
    compute: str = "O(1)"
    communication: str = "0"

    @property
    def collectives(self) -> tuple[str, ...]:
        """The abbreviations of the collectives that the table allows."""
        return tuple(sorted(set(_ABBREVIATIONS.values()) & set(self.communication.split())))

    @property
    def powers(self) -> dict[str, int]:
        """The powers of D in flops and bytes per partition.

        The table's O(sqrt(D)) for AllToAll is its time on a 2-D torus; its bytes are O(1).
        """
        return {
            "flops": int(self.compute == "O(D)"),
            "bytes": int(self.communication.startswith("O(D)")),
        }


@dataclasses.dataclass(frozen=True)
class Place:
    """What an operator is compiled for: D, and a TPU topology or None for JAX's own devices."""

    num_partitions: int
    topology: str | None = None

    @property
    def compiler(self) -> str:
        """The TPU's generation or `own`; only figures of one compiler are comparable."""
        return "own" if self.topology is None else self.topology.partition(":")[0]


OWN_DEVICES = tuple(Place(d) for d in (2, 4, 8))
TPU_V3 = tuple(Place(d, topology.v3(d)) for d in (8, 16, 32, 64, 128, 256, 512, 1024, 2048))


@dataclasses.dataclass(frozen=True)
class Measured:
    """One operator, compiled for a place.

    Attributes:
      place: the number of partitions and what they are.
      collectives: (kind, count) of those found.
      flops: flops per partition, by XLA's count.
      communicated_bytes: the results of all collectives on one partition.
    """

    place: Place
    collectives: tuple[tuple[str, int], ...]
    flops: float
    communicated_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator and its measurements, by compiler and then by the number of partitions."""

    operator: Operator
    measured: tuple[Measured, ...]

    @property
    def difference(self) -> str:
        """How the compilers differ from the table; empty if they do not."""
        by_compiler = itertools.groupby(self.measured, lambda each: each.place.compiler)
        return "; ".join(
            f"{compiler}: {reason}"
            for compiler, measured in by_compiler
            for reason in _differences(self.operator, tuple(measured))
        )


def _einsum(equation: str) -> Callable[..., tf.Tensor]:
    return lambda *operands: tf.einsum(equation, *operands)


def _convolution(x_BXYI: tf.Tensor, kernel_xyIO: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(x_BXYI, kernel_xyIO, 1, "SAME")


def _product(split: str, **columns: Any) -> Operator:
    name = f"Matmul(AB,BC->AC) {','.join(split)}"
    return Operator(name, _einsum("AB,BC->AC"), ("AB", "BC"), "AC", split, **columns)


_SUMMED = {"communication": "O(1) AR"}
_UNMATCHED = {"total_compute": "O(D^2)", "compute": "O(D)", "communication": "O(D) AG or CP"}

TABLE_4 = (
    Operator("Add(A,A->A) A", lambda a, b: a + b, ("A", "A"), "A", "A"),
    _product("B", **_SUMMED),
    _product("A"),
    _product("AB", **_UNMATCHED),
    _product("AC", **_UNMATCHED),
    Operator("Reduce(AB->A) A", lambda a: tf.reduce_sum(a, 1), ("AB",), "A", "A"),
    Operator("Reduce(AB->B) A", lambda a: tf.reduce_sum(a, 0), ("AB",), "B", "A", **_SUMMED),
    Operator(
        "Einsum(GSEC,GSM->EGCM) G,E",
        _einsum("GSEC,GSM->EGCM"),
        ("GSEC", "GSM"),
        "EGCM",
        "GE",
        communication="O(sqrt(D)) AA",
    ),
    # In TensorFlow's order of dims; x and y are the kernel's.
    Operator(
        "Convolution(BIXY,xyIO->BOXY) X",
        _convolution,
        ("BXYI", "xyIO"),
        "BXYO",
        "X",
        communication="O(1) CP",
    ),
)


def lines() -> Iterator[str]:
    """Yields Table 4 measured on JAX's own devices and, if its compiler is installed, TPU v3."""
    places = OWN_DEVICES
    if topology.is_installed():
        places += TPU_V3
    else:
        yield "Without TPUs, which `make setup-tpu` installs the compiler for."
    for row in rows(places):
        yield text(row)


def rows(places: Sequence[Place]) -> tuple[Row, ...]:
    """Returns Table 4 measured; each compiler needs two or more numbers of partitions.

    Raises:
      ValueError: more partitions than devices; or as topology.compile_program.
    """
    ordered = sorted(places, key=lambda place: (place.compiler, place.num_partitions))
    return tuple(
        Row(operator, tuple(_measure(operator, place) for place in ordered)) for operator in TABLE_4
    )


def text(row: Row) -> str:
    """Returns the paper's columns, then for each place: collectives, flops, bytes."""
    paper = row.operator
    verdict = f"different: {row.difference}" if row.difference else "equal"
    cells = []
    for each in row.measured:
        kinds = " ".join(f"{count} {_ABBREVIATIONS[kind]}" for kind, count in each.collectives)
        place = f"D={each.place.num_partitions} {each.place.topology or 'own'}"
        sent = f"{each.communicated_bytes} bytes"
        cells.append((place, kinds or "none", f"{each.flops:.0f} flop", sent))
    return (
        f"{paper.name}: total {paper.total_compute}, per partition {paper.compute}, "
        f"communication {paper.communication}: {verdict}\n{table.text(cells, indent='  ')}"
    )


def _measure(operator: Operator, place: Place) -> Measured:
    exported = _export(operator, place.num_partitions)
    if place.topology is None:
        report = compile_program(exported).report()
    else:
        report = topology.compile_program(exported, place.topology).report()
    found = tuple((kind, count) for kind, count in report.collectives if count)
    communicated_bytes = 0
    for each in report.collective_ops:
        assert each.times is not None, operator.name  # No operator has a loop of unknown length.
        communicated_bytes += each.times * each.result_bytes
    return Measured(place, found, report.flops, communicated_bytes)


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
    for each in measured:
        found = {_ABBREVIATIONS[kind] for kind, _ in each.collectives}
        if not found <= set(operator.collectives) or bool(found) != bool(operator.collectives):
            yield f"{_communication(found, operator)} from D={each.place.num_partitions}"
            break
    first, last = measured[0], measured[-1]
    growth = last.place.num_partitions / first.place.num_partitions
    for name, start, end in (
        ("flops", first.flops, last.flops),
        ("bytes", first.communicated_bytes, last.communicated_bytes),
    ):
        expected = operator.powers[name]
        power = math.log(end / start, growth) if start and end else 0.0
        if abs(power - expected) > _POWER_TOLERANCE:
            yield f"{name} grow as D^{power:.2f}, not D^{expected}"


def _communication(found: Iterable[str], operator: Operator) -> str:
    if found == {"AR"} and "AG" in operator.collectives:
        return "gathers by AR, a sum of parts that are zero in each other's places,"
    expected = "/".join(operator.collectives) or "nothing"
    return f"communicates by {'+'.join(sorted(found)) or 'nothing'}, not {expected},"
