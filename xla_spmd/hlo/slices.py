"""Collectives between slices of TPUs, which the data center's network connects.

The TPU's compiler splits a sum over all slices: the part within a slice is an ordinary collective,
and the part across slices is a `send` to the host and a `recv` from it, which the hosts carry out
for the program. Their attributes give the kind and the devices:

    _xla_megascale_transfer_type="ALL_REDUCE"
    _xla_megascale_target="{1,2}x{0:255}"

            between slices 1 and 2, on devices 0 to 255 of each: each device with the same-numbered
            device of the other slice

    _xla_megascale_target={{100000,200000},{100001,200001}}
    _xla_megascale_target={{100000->200000},{200000->100000}}

            the same for devices 0 and 1, and for a permute; 200001 is device 1 of slice 2

Slices count from 1, and devices within a slice from 0.
"""

import dataclasses
import re

from xla_spmd.hlo.hlo_module import Instruction, Module

_TYPE = "_xla_megascale_transfer_type"
_TARGET = "_xla_megascale_target"
# The kind of collective for each type of transfer.
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_DEVICES = 100_000  # A device's number is its slice's times this, plus its own there.
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
_GROUP = re.compile(r"\{([\d,]+|\d+->\d+)\}")

# A device: its slice, and its number within the slice, both from 0.
_Device = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between slices: its kind, and the devices of each group."""

    kind: str  # One of hlo_module.COLLECTIVES.
    groups: tuple[tuple[_Device, ...], ...]  # A permute has (source, target) pairs.

    def partitions(self, devices_per_slice: int) -> tuple[tuple[int, ...], ...]:
        """Returns the partitions of each group.

        Partitions are numbered slice by slice, as JAX puts slices on the outermost axis of a mesh.
        """
        numbered = []
        for group in self.groups:
            numbered.append(tuple(devices_per_slice * slice_ + i for slice_, i in group))
        return tuple(numbered)


def is_between_slices(instruction: Instruction) -> bool:
    """Returns whether a send or recv goes between slices, through the hosts."""
    attributes = instruction.proto.frontend_attributes.map
    return instruction.proto.is_host_transfer and _TYPE in attributes


def transfer(instruction: Instruction) -> Transfer:
    """Returns the collective of a send or recv between slices.

    Raises ValueError if its attributes are unknown.
    """
    attributes = instruction.proto.frontend_attributes.map
    type_ = attributes[_TYPE]
    if type_ not in _KINDS:
        raise ValueError(
            f"{instruction.name}: {_TYPE}={type_} is unknown; known are {', '.join(_KINDS)}."
        )

    target = attributes.get(_TARGET, "").replace(" ", "")
    groups = _groups(target)
    if not groups:
        raise ValueError(
            f"{instruction.name}: {_TARGET}={target!r}, expected such as {{1,2}}x{{0:255}}."
        )
    return Transfer(_KINDS[type_], groups)


def _groups(target: str) -> tuple[tuple[_Device, ...], ...]:
    """Returns the groups of a target in any of its forms; () if it is malformed."""
    groups: list[tuple[_Device, ...]] = []
    for slices, devices in _PRODUCT.findall(target):
        for device in _numbers(devices):
            groups.append(tuple((slice_ - 1, device) for slice_ in _numbers(slices)))
    if groups:
        return tuple(groups)

    for group in _GROUP.findall(target):
        numbers = map(int, group.replace("->", ",").split(","))
        devices = (divmod(number, _DEVICES) for number in numbers)
        groups.append(tuple((slice_ - 1, device) for slice_, device in devices))
    return tuple(groups)


def devices_per_slice(module: Module) -> int:
    """Returns the number of devices per slice: the most that a transfer names; 0 without any."""
    most = 0
    for instruction in module.instructions():
        if instruction.opcode == "recv" and is_between_slices(instruction):
            for group in transfer(instruction).groups:
                most = max(most, *(device + 1 for _, device in group))
    return most


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list, for example `0:3,8`, where 0:3 means 0 to 3."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
