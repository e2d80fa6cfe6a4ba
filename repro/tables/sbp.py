"""OneFlow's tables of signatures and conversions, with the communication of today's compilers.

Each row is a separate program for 8 partitions, on JAX's own devices or on a topology that need not
be attached. With one axis, it is d of size 8; with two, they are x of size 2 and y of size 4.

A rows, K contracted, B columns; M and N are A and K after a conversion. P counts terms.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import states
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.partial import Partial
from lingvo_gshard.sharding.states import PARTIAL
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.spmd.program import Program
from xla_spmd.hlo.compiled_report import CompiledReport
from xla_spmd.mesh import Mesh

# A tensor's state along each axis of the mesh.
States = tuple[str, ...]
Compile = Callable[[Program], Executable]

PRODUCT = "AK,KB->AB"
# All sizes are multiples of 8, so no dim is uneven. For smaller tensors, TPUs do not scatter sums.
SIZES = {"A": 512, "K": 256, "B": 64, "M": 512, "N": 256}
_MESHES = {1: Mesh.flat(8), 2: Mesh(("x", "y"), (2, 4))}


@dataclasses.dataclass(frozen=True)
class Product:
    """A signature of the product of two matrices, along one axis or two."""

    left: States
    right: States
    result: States


@dataclasses.dataclass(frozen=True)
class Sum:
    """A signature of the sum of two matrices: both have the state of the result."""

    result: States


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion from a matrix's states to other states."""

    start: States
    end: States
    expected: str = ""  # The kind of collective in OneFlow; empty without one.


Case = Product | Sum | Conversion

# The conversions of the OneFlow paper (Yuan et al., 2021) along one axis. It also converts S(i) to
# P.
CONVERSIONS = (
    Conversion(("S(0)",), ("S(1)",), "all-to-all"),
    Conversion(("S(0)",), ("B",), "all-gather"),
    Conversion(("B",), ("S(0)",)),
    Conversion(("B",), ("P",)),
    Conversion(("P",), ("B",), "all-reduce"),
    Conversion(("P",), ("S(0)",), "reduce-scatter"),
    Conversion(("P",), ("S(1)",), "reduce-scatter"),
)
# If only one axis's state changes, the conversion is the same among the devices along that axis.
CONVERSIONS_ALONG_TWO_AXES = (
    Conversion(("S(0)", "S(1)"), ("B", "S(1)"), "all-gather"),
    Conversion(("S(0)", "S(1)"), ("B", "B"), "all-gather"),
    Conversion(("S(0)", "S(0)"), ("S(0)", "S(1)"), "all-to-all"),
    Conversion(("S(0)", "P"), ("S(0)", "B"), "all-reduce"),
    Conversion(("S(0)", "P"), ("S(0)", "S(1)"), "reduce-scatter"),
    Conversion(("P", "P"), ("B", "B"), "all-reduce"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A case, and one compiler's program for it."""

    case: Case
    report: CompiledReport


def products(num_axes: int) -> list[Product]:
    """Returns all signatures of the product along one axis or two, except with two sums.

    Along two axes, each axis has a separate signature. A result that is P along both is left out:
    Partial is one sum, along one axis or along several at once.
    """
    cases: list[Product] = []
    for along_axes in itertools.product(_signatures(), repeat=num_axes):
        left, right, result = zip(*along_axes, strict=True)
        if result.count(PARTIAL) <= 1:
            cases.append(Product(left, right, result))
    return cases


def _signatures() -> list[States]:
    """Returns the states of both factors and of the product, along one axis, of each signature."""
    signatures = []
    for factors in itertools.product(states.all_states(rank=2), repeat=2):
        result = states.einsum_state(PRODUCT, factors)
        if result is not None:
            signatures.append((*factors, result))
    return signatures


def sums() -> list[Sum]:
    """Returns all signatures of the sum of two matrices along one axis."""
    return [Sum((state,)) for state in states.all_states(rank=2)]


def measure(cases: Sequence[Case], compile: Compile) -> Iterator[Row]:
    """Yields each case compiled. An error of `compile` passes through."""
    for case in cases:
        program = tracer.traced(export, case)
        yield Row(case, compile(program).report())


# --- The programs ---


def export(case: Case) -> Program:
    """Returns the program of a case, with its states for the arguments and the result.

    An argument or a result in state P is its terms, [P, ...].
    """
    match case:
        case Product(left, right, result):
            return _program([("AK", left), ("KB", right)], ("AB", result), _product)
        case Sum(result):
            return _program([("AK", result), ("AK", result)], ("AK", result), _sum)
        case Conversion(start, end):
            return _program([("AK", start)], ("MN", end), _converted)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The result's layout, for the function of a program."""

    partitioning: Partitioning
    states: States


def _program(
    operands: list[tuple[str, States]],
    result: tuple[str, States],
    fn: Callable[..., tf.Tensor | Partial],
) -> Program:
    """Exports `fn` of a _Layout and operands, with these dims and states, and this result."""
    dims, result_states = result
    mesh = _MESHES[len(result_states)]
    partitioning = Partitioning.from_dict(mesh, _table(mesh, [*operands, result]))
    layout = _Layout(partitioning, result_states)

    def of_operands(batch: NestedMap) -> NestedMap:
        values = [
            _value(tensor, *operand, partitioning)
            for tensor, operand in zip(batch.Flatten(), operands, strict=True)
        ]
        y = fn(layout, *values)
        assert isinstance(y, Partial) == (PARTIAL in result_states)
        return NestedMap(y=y.terms if isinstance(y, Partial) else y)

    batch = NestedMap()
    for i, (operand_dims, operand_states) in enumerate(operands):
        batch[f"x{i}"] = _spec(operand_dims, operand_states, mesh)
    result_dims = {"y": _spec(dims, result_states, mesh).dims}
    annotated = AnnotatedFn("sbp", of_operands, ("batch",), (batch,), result_dims)
    return lowering.export(annotated, partitioning)


def _product(
    layout: _Layout, x: tf.Tensor | Partial, w: tf.Tensor | Partial
) -> tf.Tensor | Partial:
    # At most one operand is a sum: its terms are multiplied by the other operand, which is whole.
    if isinstance(x, Partial):
        return x.einsum("AK,KB->AB", w)
    if isinstance(w, Partial):
        return w.einsum("KB,AK->AB", x)
    if PARTIAL in layout.states:
        return Partial.from_einsum(layout.partitioning, PRODUCT, x, w, letter="K")
    return tf.einsum(PRODUCT, x, w)


def _sum(layout: _Layout, x: tf.Tensor | Partial, y: tf.Tensor | Partial) -> tf.Tensor | Partial:
    return x + y


def _converted(layout: _Layout, x: tf.Tensor | Partial) -> tf.Tensor | Partial:
    mesh = layout.partitioning.mesh
    if PARTIAL in layout.states:
        return Partial.from_whole(layout.partitioning, x, "MN", _axes(mesh, layout.states, PARTIAL))
    if not isinstance(x, Partial):
        return Annotator(layout.partitioning).annotate(x, "MN")

    # The dim, if any, that is finally split along the axis of the terms.
    states_by_axis = dict(zip(mesh.axis_names, layout.states, strict=True))
    (state,) = {states_by_axis[name] for name in x.axis}
    return x.reduce(split={states.split(0): "A", states.split(1): "K"}.get(state))


def _value(
    tensor: tf.Tensor, dims: str, tensor_states: States, partitioning: Partitioning
) -> tf.Tensor | Partial:
    axes = _axes(partitioning.mesh, tensor_states, PARTIAL)
    return Partial.from_terms(partitioning, tensor, dims, axes) if axes else tensor


def _spec(dims: str, tensor_states: States, mesh: Mesh) -> TensorSpec:
    """Returns the spec of a matrix, or of its terms."""
    shape = tuple(SIZES[letter] for letter in dims)
    if PARTIAL not in tensor_states:
        return TensorSpec(shape, "float32", dims)
    num_terms = mesh.size(_axes(mesh, tensor_states, PARTIAL))
    return TensorSpec((num_terms, *shape), "float32", f"P{dims}")


def _table(mesh: Mesh, tensors: list[tuple[str, States]]) -> dict[str, tuple[str, ...]]:
    """Returns the axes of each letter, from the states of the tensors with that letter."""
    table: dict[str, tuple[str, ...]] = {}
    for dims, tensor_states in tensors:
        table["P"] = _axes(mesh, tensor_states, PARTIAL) or table.get("P", ())
        for i, letter in enumerate(dims):
            # A result that is no longer split along a letter does not change the operands' axes.
            table[letter] = _axes(mesh, tensor_states, states.split(i)) or table.get(letter, ())
    return {letter: axes for letter, axes in table.items() if axes}


def _axes(mesh: Mesh, tensor_states: States, state: str) -> tuple[str, ...]:
    """Returns the axes along which a tensor has a given state."""
    pairs = zip(mesh.axis_names, tensor_states, strict=True)
    return tuple(name for name, axis_state in pairs if axis_state == state)
