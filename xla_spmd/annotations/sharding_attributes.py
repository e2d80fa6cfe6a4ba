"""ShardingAttributes: Shardy's attributes for the annotations that TensorFlow has written."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.annotations import tilings
from xla_spmd.annotations.tilings import Tiling
from xla_spmd.mesh import Mesh
from xla_spmd.runtime.jax_private import ir

MESH = "mesh"  # JAX's name of a program's mesh.
GSPMD = "mhlo.sharding"  # The attribute of GSPMD's annotations.


class ShardingAttributes:
    """Makes the attributes for one module, and adds the meshes that they name to it.

    The module's own mesh, which is added unless JAX has done so, is called MESH. A device order
    that its axes cannot express gets a further mesh.
    """

    def __init__(self, what: str, module: Any, mesh: Mesh) -> None:
        """`what` begins the messages of errors."""
        self.what = what
        self.mesh = mesh.grid
        self._module = module
        self._names: dict[Tiling, str] = {}  # The names of the further meshes.
        self._has_warned = False
        if MESH not in ir.SymbolTable(module.operation):
            self._add_mesh(MESH, mesh.shape)

    def of_call(self, call: Any) -> str:
        """Returns, as Shardy's text, the sharding that a custom call of GSPMD gives its result.

        Raises ValueError if the annotation is neither replicated nor tiled over all devices.
        """
        return self.of_text(call.attributes[GSPMD].value, call.operands[0], call.results[0])

    def of_text(self, text: str, named: Any, value: Any) -> str:
        """Returns the sharding of a value with GSPMD's annotation `text`.

        If XLA could not slice a dim along its axes, the parts are the same, but on other devices.
        Raises ValueError, which names the value `named`, if the annotation is neither replicated
        nor tiled over all devices.
        """
        tiling = self._tiling(text, named, value)
        dims = tilings.along(tiling, self.mesh)
        if dims is None:
            return self._of_device_order(tiling)
        sliceable = tilings.sliceable(dims, self.mesh)
        if sliceable is None:
            return _along(dims, value)
        self._warn_of_order(dims)
        return self._of_device_order(sliceable)

    def _warn_of_order(self, dims: Sequence[tuple[tilings.SubAxis, ...]]) -> None:
        """Warns, once for a module, that a dim over such axes costs most of the parallelism."""
        if self._has_warned:
            return
        self._has_warned = True
        axes = [" and ".join(axis.axis for axis in along) for along in dims if len(along) > 1]
        logging.warning(
            "%s: the mesh %s has a dim over %s, whose sizes do not divide each other. XLA may be "
            "wrong there, so each device computes the products of such tensors whole. Choose sizes "
            "of which one divides the other.",
            self.what,
            self.mesh.shape,
            ", and one over ".join(axes),
        )

    def of_region(self, call: Any) -> str:
        """Returns the sharding of a tensor that enters or leaves a manual region.

        It is along the axes of the module's own mesh, as everything in a region must be. Raises
        ValueError if the annotation is neither replicated nor tiled over all devices, or if the
        mesh's axes cannot express it.
        """
        text = call.attributes[GSPMD].value
        dims = tilings.along(self._tiling(text, call.operands[0], call.results[0]), self.mesh)
        if dims is None:
            raise ValueError(
                f"{self._where(call.operands[0], call.results[0])}: no axes of the mesh "
                f"{self.mesh.shape} give the annotation {text}, as they must in a manual region."
            )
        return _along(dims, call.results[0])

    def _tiling(self, text: str, named: Any, value: Any) -> Tiling:
        """Returns the tiling of an annotation. Raises ValueError unless it covers all devices."""
        try:
            tiling = tilings.parse(text)
        except ValueError as error:
            where = self._where(named, value)
            raise ValueError(f"{where}: {error} of the mesh {self.mesh.shape}.") from error

        num_devices = self.mesh.num_partitions
        if tiling.ways and tiling.num_devices != num_devices:
            raise ValueError(
                f"{self._where(named, value)}: the annotation {text} is for {tiling.num_devices} "
                f"devices, but the mesh {self.mesh.shape} has {num_devices}."
            )
        return tiling

    def _where(self, named: Any, value: Any) -> str:
        """Returns the program and the name and shape of a tensor, which begin an error."""
        return f"{self.what}: {location(named)} of shape {list(stablehlo.shape(value))}"

    def replicated(self, rank: int) -> str:
        """Returns the sharding of a tensor that every device holds whole, as Shardy's text."""
        return text(MESH, [], rank)

    def all_axes(self) -> Any:
        """Returns the attribute of a manual computation that is manual along every axis."""
        names = ", ".join(f'"{name}"' for name in self.mesh.axis_names)
        return ir.Attribute.parse(f"#sdy<manual_axes{{{names}}}>")

    def _of_device_order(self, tiling: Tiling) -> str:
        """Returns the sharding over a mesh that lists the devices in the order of the parts."""
        num_copies = len(tiling.devices[0])
        sizes = {f"dim{i}": size for i, size in enumerate((*tiling.ways, num_copies)) if size > 1}
        if tiling not in self._names:
            self._names[tiling] = f"device_order_{len(self._names)}"
            devices = [device for part in tiling.devices for device in part]
            self._add_mesh(self._names[tiling], sizes, devices)

        dims = [f'"dim{i}"' if size > 1 else "" for i, size in enumerate(tiling.ways)]
        return text(self._names[tiling], dims, len(dims))

    def _add_mesh(self, name: str, sizes: dict[str, int], devices: Sequence[int] = ()) -> None:
        """Adds a mesh to the top of the module; without `devices`, they are 0, 1, 2, ..."""
        axes = ", ".join(f'"{axis}"={size}' for axis, size in sizes.items())
        order = f", device_ids={list(devices)}" if devices else ""
        parsed = ir.Module.parse(f"module {{ sdy.mesh @{name} = <[{axes}]{order}> }}")
        at_top = ir.InsertionPoint.at_block_begin(self._module.body)
        parsed.body.operations[0].operation.clone(at_top)


def sharding(text: str) -> Any:
    """Returns the attribute of one tensor's sharding."""
    return ir.Attribute.parse(f"#sdy.sharding{text}")


def shardings(texts: Iterable[str]) -> Any:
    """Returns the attribute of several tensors' shardings."""
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(texts)}]>")


def constrained(value: Any, attribute: Any) -> Any:
    """Returns a tensor with this sharding, by a constraint at the insertion point."""
    constraint = ir.Operation.create(
        "sdy.sharding_constraint",
        results=[value.type],
        operands=[value],
        attributes={"sharding": attribute},
    )
    return constraint.results[0]


def constrain_result(operation: Any, number: int, attribute: Any) -> None:
    """Gives a result of an operation this sharding, by a constraint that all its users read."""
    result = operation.results[number]
    with ir.InsertionPoint(operation), operation.location:
        value = constrained(result, attribute)
    constraint = value.owner.operation
    constraint.move_after(operation)
    result.replace_all_uses_except(value, constraint)


def location(value: Any) -> str:
    """Returns the name that TensorFlow gave the operation of a value, or where the value is."""
    text = str(value.location)
    _, _, quoted = text.partition('"')
    name, _, _ = quoted.partition('"')
    return name or text


def _along(dims: Sequence[Sequence[tilings.SubAxis]], value: Any) -> str:
    """Returns the sharding of a value along axes of the module's own mesh."""
    rank = len(stablehlo.shape(value))
    return text(MESH, [", ".join(map(str, axes)) for axes in dims], rank)


def text(mesh: str, dims: Sequence[str], rank: int) -> str:
    """Returns Shardy's text of a sharding.

    `dims` are the axes of each dim, such as `"x", "y"`; omitted dims are whole.
    """
    braced = [f"{{{axes}}}" for axes in dims]
    braced += ["{}"] * (rank - len(braced))
    return f"<@{mesh}, [{', '.join(braced)}]>"
