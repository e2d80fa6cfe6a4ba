"""Manual regions: code between two conversions of GSPMD becomes an sdy.manual_computation.

In GSPMD's form, code for one partition is mixed with the code for all of them. It begins where a
tensor is converted to a partition's part (an entry), and ends where a part is converted to the
whole (an exit):

    %part = custom_call @SPMDFullToShardShape(%x)
    %y = tanh %part
    %whole = custom_call @SPMDShardToFullShape(%y)

Shardy has an operation that holds such code. It takes the whole tensors that enter and returns the
tensors that leave, so all code between them moves into it:

    %whole = sdy.manual_computation(%x) { %y = tanh %part; return %y }

Exits that share operations leave one region together, unless an entry of one needs the result of
another, as the gradient's entries need the forward result. Then each has its own region, and both
compute the shared operations; the compiler merges equal operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.annotations import sharding_attributes
from xla_spmd.annotations.sharding_attributes import ShardingAttributes
from xla_spmd.runtime.jax_private import ir
from xla_spmd.stablehlo import FULL_TO_SHARD, SHARD_TO_FULL, SHARDING

_RANDOM = "stablehlo.rng"  # It draws different numbers each time.
# Operations whose results depend on where, or how often, they run, and the end of a block.
_IMPURE = (
    "stablehlo.custom_call",
    "stablehlo.partition_id",
    "stablehlo.replica_id",
    "stablehlo.return",
    _RANDOM,
    "stablehlo.rng_bit_generator",
)


def outline(block: Any, attributes: ShardingAttributes) -> None:
    """Moves the manual code of a block, and of the blocks inside it, into manual computations.

    Raises ValueError if a partition's part leaves its region without an exit, for example in the
    carry of a loop.
    """
    operations = [view.operation for view in block.operations]
    for operation in operations:
        for region in operation.regions:
            for inner in region.blocks:
                outline(inner, attributes)

    if any(stablehlo.calls(op, FULL_TO_SHARD, SHARD_TO_FULL) for op in operations):
        _Outline(operations, attributes).run()


@dataclasses.dataclass(eq=False)
class _Region:
    """The exits that leave together, and the operations of the block that compute their parts."""

    stage: int
    exits: list[Any]
    inside: set[Any]


class _Outline:
    """The manual code of one block."""

    def __init__(self, operations: list[Any], attributes: ShardingAttributes) -> None:
        self._attributes = attributes
        self._operations = operations
        self._place: dict[Any, int] = {}
        self._number()

        # Operations that compute with parts, entries among them.
        self._inside: set[Any] = set()
        # Operations on constants alone; each region gets its own copies of them.
        self._constant: set[Any] = set()
        # The number of regions that must end, one after another, before an operation can run.
        self._stage: dict[Any, int] = {}

    def run(self) -> None:
        """Replaces all regions of the block."""
        for operation in self._operations:
            self._classify(operation)
        self._check_leaving()

        regions = self._regions()
        self._check_random(regions)
        for region in regions:
            self._replace(region)

        # Erase from the last one on, so that operations whose only users are erased go, too.
        for operation in reversed(self._operations):
            is_manual = operation in self._inside or stablehlo.calls(operation, SHARD_TO_FULL)
            if is_manual and not any(_is_used(value) for value in operation.results):
                operation.erase()

    def _classify(self, operation: Any) -> None:
        """Records whether an operation is inside a region or constant, and its stage."""
        # Arguments of the block and values of outer blocks are not constant, and are in stage 0.
        sources = {value.owner for value in _outer_operands(operation)}
        stage = max((self._stage.get(source, 0) for source in sources), default=0)

        if stablehlo.calls(operation, SHARD_TO_FULL):
            stage += 1
        elif stablehlo.calls(operation, FULL_TO_SHARD) or _is_mark(operation):
            self._inside.add(operation)
        elif sources & self._inside:
            self._inside.add(operation)
        elif sources <= self._constant and _is_constant(operation):
            self._constant.add(operation)
        self._stage[operation] = stage

    def _check_leaving(self) -> None:
        """Raises ValueError if the block returns a part."""
        for value in self._operations[-1].operands:
            if value.owner in self._inside:
                shape = list(stablehlo.shape(value))
                raise ValueError(
                    f"{self._attributes.what}: {sharding_attributes.location(value)} of shape "
                    f"{shape} is one partition's part, but leaves its manual region without "
                    "manual_to_auto_spmd_partition, as the carry of a loop or the result of a "
                    "branch. If the gradient of a loop needs it, use Annotator.locally, whose "
                    "gradient needs whole tensors alone."
                )

    def _check_entered(self, exit_: Any) -> None:
        """Raises ValueError if an exit converts a value that has not entered a manual region."""
        (part,) = exit_.operands
        if part.owner not in self._inside | self._constant:
            raise ValueError(
                f"{self._attributes.what}: {sharding_attributes.location(part)} of shape "
                f"{list(stablehlo.shape(part))} leaves a manual region that it has not entered; "
                "expected a part of a tensor that enters in the same function or loop body, or a "
                "constant."
            )

    def _regions(self) -> list[_Region]:
        """Returns the regions of the block. Raises ValueError if an exit's part has not entered."""
        regions: list[_Region] = []
        for operation in self._operations:
            if not stablehlo.calls(operation, SHARD_TO_FULL):
                continue
            self._check_entered(operation)

            # Exits of one stage that share an operation leave one region together.
            region = _Region(self._stage[operation], [operation], self._computing(operation))
            others = []
            for other in regions:
                if other.stage == region.stage and other.inside & region.inside:
                    region.exits = other.exits + region.exits
                    region.inside |= other.inside
                else:
                    others.append(other)
            regions = [*others, region]
        return regions

    def _check_random(self, regions: list[_Region]) -> None:
        """Raises ValueError if two regions would each draw the same random numbers."""
        drawn: set[Any] = set()
        for region in regions:
            drawing = {operation for operation in region.inside if operation.name == _RANDOM}
            for operation in drawn & drawing:
                (numbers,) = operation.results
                raise ValueError(
                    f"{self._attributes.what}: {sharding_attributes.location(numbers)} of shape "
                    f"{list(stablehlo.shape(numbers))} is drawn at random in a manual region, and "
                    "another region needs the same numbers; draw them outside, or by a stateless "
                    "generator."
                )
            drawn |= drawing

    def _computing(self, exit_: Any) -> set[Any]:
        """Returns the operations inside the region that compute the part of an exit."""
        computing: set[Any] = set()
        waiting = [exit_.operands[0].owner]
        while waiting:
            operation = waiting.pop()
            if operation not in self._inside or operation in computing:
                continue
            computing.add(operation)
            if not stablehlo.calls(operation, FULL_TO_SHARD):
                waiting += [value.owner for value in _outer_operands(operation)]
        return computing

    def _replace(self, region: _Region) -> None:
        """Replaces the exits of a region by a manual computation."""
        exits = sorted(region.exits, key=self._place.__getitem__)
        inside = sorted(region.inside, key=self._place.__getitem__)
        entries = [op for op in inside if stablehlo.calls(op, FULL_TO_SHARD)]

        # The annotation of a tensor that enters becomes its sharding in the computation.
        annotations = [_annotation(entry, self._attributes.what) for entry in entries]
        operands = [annotation.operands[0] for annotation in annotations]
        in_shardings = [self._attributes.of_region(annotation) for annotation in annotations]
        out_shardings = [self._attributes.of_region(exit_) for exit_ in exits]

        # Other values from outside, such as the counter of a loop, are the same on all devices.
        captured = self._captured(inside)
        operands += captured
        for value in captured:
            in_shardings.append(self._attributes.replicated(len(stablehlo.shape(value))))

        self._move_first_exit_after(operands, exits)
        computation = ir.Operation.create(
            "sdy.manual_computation",
            results=[exit_.results[0].type for exit_ in exits],
            operands=operands,
            attributes={
                "in_shardings": sharding_attributes.shardings(in_shardings),
                "out_shardings": sharding_attributes.shardings(out_shardings),
                "manual_axes": self._attributes.all_axes(),
            },
            regions=1,
            loc=exits[0].location,
            ip=ir.InsertionPoint(exits[0]),
        )
        self._operations.insert(self._place[exits[0]], computation)
        self._number()

        parts = [entry.results[0] for entry in entries] + captured
        body = computation.regions[0].blocks.append(*[value.type for value in parts])
        copies = _Copies(dict(zip(parts, body.arguments, strict=True)))
        with ir.InsertionPoint(body):
            for operation in inside:
                if not stablehlo.calls(operation, FULL_TO_SHARD):
                    copies.add(operation)
            results = [copies.of(exit_.operands[0]) for exit_ in exits]
            ir.Operation.create("sdy.return", operands=results)

        for exit_, whole in zip(exits, computation.results, strict=True):
            exit_.results[0].replace_all_uses_with(whole)

    def _captured(self, inside: list[Any]) -> list[Any]:
        """Returns the values that operations inside a region read from outside, each once."""
        captured: dict[Any, None] = {}
        for operation in inside:
            if stablehlo.calls(operation, FULL_TO_SHARD):
                continue
            for value in _outer_operands(operation):
                if value.owner not in self._inside and value.owner not in self._constant:
                    captured[value] = None
        return list(captured)

    def _move_first_exit_after(self, operands: list[Any], exits: list[Any]) -> None:
        """Moves the first exit, and the operations that need one of the exits, after `operands`."""
        first = self._place[exits[0]]
        # Arguments of blocks come before all operations.
        end = max((self._place.get(value.owner, -1) for value in operands), default=-1) + 1
        if end <= first:
            return

        kept = self._operations[:first]
        moved: list[Any] = []
        needing = set(exits)
        for operation in self._operations[first:end]:
            sources = {value.owner for value in _outer_operands(operation)}
            if operation in needing or sources & needing:
                needing.add(operation)
                moved.append(operation)
                operation.move_before(self._operations[end])
            else:
                kept.append(operation)

        self._operations = [*kept, *moved, *self._operations[end:]]
        self._number()

    def _number(self) -> None:
        """Numbers the operations of the block in their order."""
        self._place = {operation: i for i, operation in enumerate(self._operations)}


class _Copies:
    """Copies of a region's operations, at the current insertion point, and of their values."""

    def __init__(self, copies: dict[Any, Any]) -> None:
        """`copies` maps values to the body's arguments that stand for them."""
        self._copies = copies

    def of(self, value: Any) -> Any:
        """Returns the copy of a value; a constant is copied when it is first needed."""
        if value not in self._copies:
            self.add(value.owner)
        return self._copies[value]

    def add(self, operation: Any) -> None:
        """Copies an operation, with the copies of its operands."""
        # TensorFlow marks parts by annotations, which are meaningless inside a computation.
        if _is_mark(operation):
            self._copies[operation.results[0]] = self.of(operation.operands[0])
            return

        operands = {value: self.of(value) for value in _outer_operands(operation)}
        copy = operation.clone()
        _replace_operands(copy, operands)
        self._copies.update(zip(operation.results, copy.results, strict=True))


def _replace_operands(operation: Any, replacements: Mapping[Any, Any]) -> None:
    """Replaces the operands of an operation and of all operations inside it."""
    for i, value in enumerate(operation.operands):
        if value in replacements:
            operation.operands[i] = replacements[value]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _replace_operands(inner.operation, replacements)


def _outer_operands(operation: Any) -> Iterator[Any]:
    """Yields the values from outside that an operation and all operations inside it read."""
    yield from operation.operands
    for region in operation.regions:
        for block in region.blocks:
            values_inside = set(block.arguments)
            for view in block.operations:
                for value in _outer_operands(view.operation):
                    if value not in values_inside:
                        yield value
                values_inside.update(view.operation.results)


def _annotation(entry: Any, what: str) -> Any:
    """Returns the annotation of the tensor that enters. Raises ValueError if it lacks one."""
    (tensor,) = entry.operands
    if isinstance(tensor.owner, ir.Block) or not stablehlo.calls(tensor.owner, SHARDING):
        raise ValueError(
            f"{what}: {sharding_attributes.location(tensor)} enters a manual region without an "
            "annotation."
        )
    return tensor.owner


def _is_mark(operation: Any) -> bool:
    """Returns whether an operation is TensorFlow's annotation of a part, before it leaves."""
    if not stablehlo.calls(operation, SHARDING):
        return False
    return operation.attributes[sharding_attributes.GSPMD].value == "{manual}"


def _is_constant(operation: Any) -> bool:
    """Returns whether an operation is constant, if all of its operands are."""
    is_arithmetic = operation.name.startswith("stablehlo.") and operation.name not in _IMPURE
    return is_arithmetic and not operation.regions


def _is_used(value: Any) -> bool:
    return next(iter(value.uses), None) is not None
