"""What the operations of StableHLO say, as MLIR's Python has them: shapes, constraints, trips."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from xla_spmd.runtime.jax_private import ir

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>?]+|complex<\w+>)>")
_INTEGER = re.compile(r"dense<(-?\d+)>")

_FRONTEND = "mhlo.frontend_attributes"
_CONSTRAINTS = ("sdy.sharding_constraint", "sdy.reshard")
# GSPMD's custom calls: its constraints, and where a shard map, or manual region, begins and ends.
SHARDING = "Sharding"
FULL_TO_SHARD = "SPMDFullToShardShape"
SHARD_TO_FULL = "SPMDShardToFullShape"


def walk(block: Any) -> Iterable[Any]:
    """Yields all operations of a block of MLIR and of the regions in them, in order."""
    for operation in block.operations:
        yield operation
        for region in operation.operation.regions:
            for inner in region.blocks:
                yield from walk(inner)


def is_constraint(operation: Any) -> bool:
    """Returns whether an operation only states how its operand is split."""
    name = operation.operation.name
    return name in _CONSTRAINTS or calls(operation.operation, SHARDING)


def calls(operation: Any, *targets: str) -> bool:
    """Returns whether an operation is a custom call of one of `targets`."""
    if operation.operation.name != "stablehlo.custom_call":
        return False
    return str(operation.operation.attributes["call_target_name"].value) in targets


def frontend_attributes(operation: Any) -> dict[str, Any]:
    """Returns the attributes that the conversion to HLO keeps, by name."""
    if _FRONTEND not in operation.attributes:
        return {}
    kept = operation.attributes[_FRONTEND]
    return {kept[i].name: kept[i].attr for i in range(len(kept))}


def set_frontend_attributes(operation: Any, attributes: Mapping[str, Any]) -> None:
    """Sets the attributes that the conversion to HLO keeps; an empty mapping removes them."""
    if attributes:
        operation.attributes[_FRONTEND] = ir.DictAttr.get(dict(attributes))
    elif _FRONTEND in operation.attributes:
        del operation.attributes[_FRONTEND]


def shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of a value, or () if it is not a tensor."""
    return _type(str(value.type))[0]


def element_bytes(value: Any) -> float:
    """Returns the bytes of an element of a value, or 0 if it is not a tensor."""
    return _type(str(value.type))[1]


def num_trips(condition: Any) -> int:
    """Returns how often a loop runs whose counter begins at 0, as JAX's do; 1 if only data know.

    Args:
      condition: the block that computes whether the loop goes on.
    """
    constants = {}
    for operation in condition.operations:
        name = operation.operation.name
        if name == "stablehlo.constant" and not shape(operation.results[0]):
            text = str(operation.operation.attributes["value"])
            constants[operation.results[0]] = _INTEGER.search(text)
        elif name == "stablehlo.compare":
            bound = constants.get(operation.operands[1])
            return max(1, int(bound[1])) if bound else 1
    return 1


@functools.cache
def _type(text: str) -> tuple[tuple[int, ...], float]:
    """Returns the shape and the bytes of an element of MLIR's text, `tensor<3x64xbf16>`."""
    tensor = _TENSOR.fullmatch(text)
    if tensor is None:
        return (), 0.0  # A token, or the seed of a generator.
    sizes, dtype = tensor.groups()
    bits = re.search(r"\d+", dtype)
    element_bits = max(8, int(bits[0])) if bits else 8
    if dtype.startswith("complex"):
        element_bits *= 2
    return tuple(int(size) for size in sizes.split("x")[:-1]), element_bits / 8
