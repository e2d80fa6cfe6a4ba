"""Collectives between slices of TPUs, which the data center's network joins.

The TPU's compiler takes a sum over all slices apart: what stays within a slice is a collective as
any other, and what crosses to other slices is a `send` to the host and a `recv` from it, which the
hosts do for the program. Their attributes tell what they do and for whom:

    _xla_megascale_transfer_type="ALL_REDUCE"
    _xla_megascale_target="{1,2}x{0:255}"     between slices 1 and 2, on each of their devices 0-255

Slices count from 1 and devices of a slice from 0; the device of a number exchanges with the devices
of its number.
"""

import dataclasses
import re

from lingvo_gshard.hlo.hlo_module import Instruction, Module

_TYPE = "_xla_megascale_transfer_type"
_TARGET = "_xla_megascale_target"
# The kind of collective that each type of transfer is.
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_NUMBERS = r"\{([\d,:\s]+)\}"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between slices: its kind, and who takes part."""

    kind: str  # One of collectives.COLLECTIVES.
    # The slices of each set, from 0, and the devices of each of these slices.
    members: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def groups(self, devices_per_slice: int) -> tuple[tuple[int, ...], ...]:
        """Returns the partitions that exchange with each other.

        Partitions are numbered slice by slice, as JAX puts slices on the outermost axis of a mesh.
        Of a permute they are (source, target) pairs, from each slice to the next.
        """
        groups: list[tuple[int, ...]] = []
        for slices, devices in self.members:
            for device in devices:
                partitions = tuple(devices_per_slice * number + device for number in slices)
                if self.kind == "collective-permute":
                    groups += zip(partitions, partitions[1:] + partitions[:1], strict=True)
                else:
                    groups.append(partitions)
        return tuple(groups)


def is_between_slices(instruction: Instruction) -> bool:
    """Returns whether a send or recv is one between slices, by way of the hosts."""
    attributes = instruction.proto.frontend_attributes.map
    return instruction.proto.is_host_transfer and _TYPE in attributes


def transfer(instruction: Instruction) -> Transfer:
    """Returns what a send or recv between slices does; ValueError if its attributes are unknown."""
    attributes = instruction.proto.frontend_attributes.map
    type_ = attributes[_TYPE]
    if type_ not in _KINDS:
        raise ValueError(
            f"{instruction.name}: {_TYPE}={type_} is unknown; known are {', '.join(_KINDS)}."
        )

    target = attributes.get(_TARGET, "")
    members = []
    for slices, devices in re.findall(f"{_NUMBERS}x{_NUMBERS}", target):
        slices_from_0 = tuple(number - 1 for number in _numbers(slices))
        members.append((slices_from_0, _numbers(devices)))
    if not members:
        raise ValueError(
            f"{instruction.name}: {_TARGET}={target!r}, expected such as {{1,2}}x{{0:255}}."
        )
    return Transfer(_KINDS[type_], tuple(members))


def devices_per_slice(module: Module) -> int:
    """Returns the devices of a slice: the most that a transfer of the program names; 0 if none."""
    most = 0
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "recv" and is_between_slices(instruction):
                for _, devices in transfer(instruction).members:
                    most = max(most, max(devices) + 1)
    return most


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list such as `0:3,8`, where 0:3 is 0 to 3."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
