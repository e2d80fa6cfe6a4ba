"""Table 4 of the paper: what its operators compute and communicate, by today's compiler.

Each operator is compiled for several numbers of partitions D, its underlined dims growing with D
and all others staying: for as many of JAX's own devices, and for the cores of TPU v3 pods, which
need not be at hand. Letters are the table's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import program, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

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
      name: as in the table, the split dims after it.
      fn: the operator on full tensors.
      operands, result: their dims. Of each, the first letter of `split` that it has is split.
      split: the letters over the partitions.
      total_compute, compute, communication: the table's columns, the latter two per partition.
      collectives: the kinds that the table allows.
      compute_power, bytes_power: the powers of D per partition. The table's O(sqrt(D)) of an
        AllToAll is its time on a 2-D torus; its bytes are O(1).
    """

    name: str
    fn: Callable[..., tf.Tensor]
    operands: tuple[str, ...]
    result: str
    split: str
    total_compute: str = "O(D)"
    compute: str = "O(1)"
    communication: str = "0"
    collectives: tuple[str, ...] = ()
    compute_power: int = 0
    bytes_power: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """What an operator is compiled for.

    Attributes:
      num_partitions: D.
      topology: the TPU's, of as many cores; None for JAX's own devices.
    """

    num_partitions: int
    topology: str | None = None

    @property
    def compiler(self) -> str:
        """Whose figures may be compared: the TPU's generation, or `own`."""
        return "own" if self.topology is None else self.topology.partition(":")[0]


OWN_DEVICES = tuple(Place(d) for d in (2, 4, 8))
TPU_V3 = tuple(Place(d, topology.v3(d)) for d in (8, 16, 32, 64, 128, 256, 512, 1024, 2048))


@dataclasses.dataclass(frozen=True)
class Measured:
    """One operator, compiled for a place.

    Attributes:
      place: how many partitions of what.
      collectives: (kind, count) of those found.
      flops: per partition, by XLA's count.
      communicated_bytes: the results of all collectives on one partition.
    """

    place: Place
    collectives: tuple[tuple[str, int], ...]
    flops: float
    communicated_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator and what was measured: by compiler, in rising order of partitions."""

    operator: Operator
    measured: tuple[Measured, ...]

    @property
    def difference(self) -> str:
        """How the compilers differ from the table; empty where they do not."""
        by_compiler = itertools.groupby(self.measured, lambda each: each.place.compiler)
        return "; ".join(
            f"{compiler}: {reason}"
            for compiler, measured in by_compiler
            for reason in _differences(self.operator, tuple(measured))
        )


def _differences(operator: Operator, measured: Sequence[Measured]) -> list[str]:
    """How one compiler's programs differ from the table's row."""
    reasons = []
    for each in measured:
        found = {kind for kind, _ in each.collectives}
        if not found <= set(operator.collectives) or bool(found) != bool(operator.collectives):
            reasons.append(f"{_communication(found, operator)} from D={each.place.num_partitions}")
            break
    flops = [each.flops for each in measured]
    sent = [float(each.communicated_bytes) for each in measured]
    growth = measured[-1].place.num_partitions / measured[0].place.num_partitions
    for what, expected, start, end in (
        ("flops", operator.compute_power, flops[0], flops[-1]),
        ("bytes", operator.bytes_power, sent[0], sent[-1]),
    ):
        power = math.log(end / start, growth) if start and end else 0.0
        if abs(power - expected) > _POWER_TOLERANCE:
            reasons.append(f"{what} grow as D^{power:.2f}, not D^{expected}")
    return reasons


def _communication(found: set[str], operator: Operator) -> str:
    if found == {"all-reduce"} and "all-gather" in operator.collectives:
        return "gathers by AR, a sum of parts that are zero in each other's places,"
    expected = "/".join(_ABBREVIATIONS[kind] for kind in operator.collectives)
    given = "+".join(sorted(_ABBREVIATIONS[kind] for kind in found))
    return f"communicates by {given or 'nothing'}, not {expected or 'nothing'},"


def _einsum(equation: str) -> Callable[..., tf.Tensor]:
    return lambda *operands: tf.einsum(equation, *operands)


def _convolution(x_BXYI: tf.Tensor, kernel_xyIO: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(x_BXYI, kernel_xyIO, 1, "SAME")


def _product(name: str, split: str, **columns: Any) -> Operator:
    return Operator(
        f"Matmul(AB,BC->AC) {name}", _einsum("AB,BC->AC"), ("AB", "BC"), "AC", split, **columns
    )


_SUMMED: dict[str, Any] = {"communication": "O(1) AR", "collectives": ("all-reduce",)}
_UNMATCHED: dict[str, Any] = {
    "total_compute": "O(D^2)",
    "compute": "O(D)",
    "communication": "O(D) AG or CP",
    "collectives": ("all-gather", "collective-permute"),
    "compute_power": 1,
    "bytes_power": 1,
}

TABLE_4 = (
    Operator("Add(A,A->A) A", lambda a, b: a + b, ("A", "A"), "A", "A"),
    _product("B", "B", **_SUMMED),
    _product("A", "A"),
    _product("A,B", "AB", **_UNMATCHED),
    _product("A,C", "AC", **_UNMATCHED),
    Operator("Reduce(AB->A) A", lambda a: tf.reduce_sum(a, 1), ("AB",), "A", "A"),
    Operator("Reduce(AB->B) A", lambda a: tf.reduce_sum(a, 0), ("AB",), "B", "A", **_SUMMED),
    Operator(
        "Einsum(GSEC,GSM->EGCM) G,E",
        _einsum("GSEC,GSM->EGCM"),
        ("GSEC", "GSM"),
        "EGCM",
        "GE",
        communication="O(sqrt(D)) AA",
        collectives=("all-to-all",),
    ),
    # In TensorFlow's order of dims; x and y count the kernel's.
    Operator(
        "Convolution(BIXY,xyIO->BOXY) X",
        _convolution,
        ("BXYI", "xyIO"),
        "BXYO",
        "X",
        communication="O(1) CP",
        collectives=("collective-permute",),
    ),
)


def measure(operator: Operator, place: Place) -> Measured:
    """Compiles `operator` for `place` and reads the program.

    Raises:
      ValueError: more partitions than devices, a collective in a loop of unknown length, or as
        topology.compile_program.
    """
    exported = _export(operator, place.num_partitions)
    if place.topology is None:
        report = exported.compile().report()
    else:
        report = topology.compile_program(exported, place.topology).report()
    return Measured(
        place,
        tuple((kind, count) for kind, count in report.collectives if count),
        report.flops,
        sum(each.result_bytes * _times(operator, each) for each in report.collective_ops),
    )


def _export(operator: Operator, num_partitions: int) -> program.Program:
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), dict.fromkeys(operator.split, "d"))
    operands = NestedMap(
        {
            f"x{i}": TensorSpec(
                tuple(_size(letter, operator, num_partitions) for letter in dims), "float32", dims
            )
            for i, dims in enumerate(operator.operands)
        }
    )

    def fn(operands: NestedMap) -> NestedMap:
        return NestedMap(y=operator.fn(*operands.Flatten()))

    annotated = AnnotatedFn("operator", fn, ("operands",), (operands,), {"y": operator.result})
    return program.export(annotated, parts)


def rows(places: Sequence[Place]) -> tuple[Row, ...]:
    """Table 4 measured.

    Raises:
      ValueError: of a compiler there are fewer than two numbers of partitions, from 2; or as
        `measure`.
    """
    ordered = sorted(set(places), key=lambda place: (place.compiler, place.num_partitions))
    for compiler in {place.compiler for place in ordered} or {"any"}:
        partitions = [place.num_partitions for place in ordered if place.compiler == compiler]
        if len(partitions) < 2 or partitions[0] < 2:
            raise ValueError(
                f"Table 4: two or more different numbers of partitions from 2 are needed to see "
                f"a growth, got {partitions} of {compiler}."
            )
    return tuple(
        Row(operator, tuple(measure(operator, place) for place in ordered)) for operator in TABLE_4
    )


def table(rows: Iterable[Row]) -> str:
    """The rows as text: the paper's columns, then per D: collectives, flops, bytes."""
    lines = []
    for row in rows:
        paper = row.operator
        verdict = f"different: {row.difference}" if row.difference else "equal"
        lines.append(
            f"{paper.name}: total {paper.total_compute}, per partition {paper.compute}, "
            f"communication {paper.communication}: {verdict}"
        )
        for each in row.measured:
            kinds = " ".join(f"{count} {_ABBREVIATIONS[kind]}" for kind, count in each.collectives)
            lines.append(
                f"  D={each.place.num_partitions:<5} {each.place.topology or 'own':<10} "
                f"{kinds or 'none':<6} {each.flops:>12.0f} flop {each.communicated_bytes:>10} bytes"
            )
    return "\n".join(lines)


def _times(operator: Operator, collective: Collective) -> int:
    if collective.times is None:
        raise ValueError(
            f"{operator.name}: its {collective.kind} is in a loop whose length is not known."
        )
    return collective.times


def _size(letter: str, operator: Operator, num_partitions: int) -> int:
    if letter in "GE":  # One group and one expert a partition, as in section 3.1.
        return num_partitions
    if letter == "C" and "G" in operator.split:  # O(1/D), as the table's footnote says.
        return max(_CAPACITIES // num_partitions, 1)
    if letter in "xy":
        return _KERNEL
    return _GROWING * num_partitions if letter in operator.split else _STAYING
