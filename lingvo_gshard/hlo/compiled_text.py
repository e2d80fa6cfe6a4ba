"""What stands in a compiled program's text: its collectives, with groups and bytes, and loops."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from lingvo_gshard.hlo import hlo_text, replica_groups, trip_counts
from lingvo_gshard.hlo.hlo_text import Computation, Instruction
from lingvo_gshard.hlo.replica_groups import Groups

COLLECTIVES = (
    "all-to-all",
    "all-reduce",
    "all-gather",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-broadcast",
)

_START = "-start"
# The TPU's fused forms. A collective that goes on while others compute stands in the computation
# that starts it, in each that it goes on in and in the last: all of one chain.
_CHAINED, _CHAIN_START = "chain_id=", 'custom_call_target="AsyncCollectiveStart"'
# An all-reduce whose result is cut into parts at once.
_REDUCE_SCATTER = "all-reduce-scatter"
_ARRAY = re.compile(r"\b(pred|bf16|c64|c128|f8\w*|[suf]\d+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one partition's program.

    Attributes:
      kind: one of COLLECTIVES; a start and its done are one, and so are the parts of a chain.
      result_bytes: of its results on one partition, each time it runs. Several tensors that the
        compiler joined count together.
      groups: the partitions that exchange with each other; of a collective-permute, the
        (source, target) pairs.
      times: how often a call runs it, the trip counts of the loops around it multiplied; None
        where the text does not give one of them.
      op_name: as Instruction's; where it comes from, not what it is.
    """

    kind: str
    result_bytes: int
    groups: Groups
    times: int | None
    op_name: str = dataclasses.field(default="", compare=False)

    @property
    def group_size(self) -> int:
        """Partitions in each group; 2 for a collective-permute."""
        return len(self.groups[0])


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: its instruction's name, and its trip count where the text gives it."""

    name: str
    trip_count: int | None


@dataclasses.dataclass(frozen=True)
class CompiledText:
    """What stands in the text: collectives in its order, loops from the outermost inwards."""

    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]
    num_instructions: int


def parse(text: str) -> CompiledText:
    """Reads a compiled program's text.

    Raises:
      ValueError: a collective's groups are written in a form that is not known.
    """
    module = hlo_text.parse(text)
    runs = trip_counts.count(module)
    return CompiledText(
        collectives=tuple(
            _collective(instruction, computation, module.num_partitions, runs.times)
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            if _kind(instruction) in COLLECTIVES and not _continues(instruction, computation)
        ),
        loops=tuple(Loop(name, trips) for name, trips in runs.trip_counts.items()),
        num_instructions=sum(len(each.instructions) for each in module.computations.values()),
    )


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix(_START)


def _continues(instruction: Instruction, computation: Computation) -> bool:
    """Whether it goes on with a collective that another computation has started."""
    if _CHAINED not in instruction.attributes:
        return False
    return all(_CHAIN_START not in each.attributes for each in computation.instructions.values())


def _collective(
    instruction: Instruction,
    computation: Computation,
    num_partitions: int,
    times: Mapping[str, int | None],
) -> Collective:
    kind, result_type = _kind(instruction), instruction.type
    if computation.name.startswith(_REDUCE_SCATTER):
        kind, result_type = "reduce-scatter", computation.instructions[computation.root].type
    elif instruction.opcode.endswith(_START) and kind != "all-reduce":
        result_type = hlo_text.tuple_elements(result_type)[1]  # Its operands stand before.
    return Collective(
        kind,
        type_bytes(result_type),
        replica_groups.parse(instruction.attributes, num_partitions),
        times[computation.name],
        instruction.op_name,
    )


def type_bytes(type_text: str) -> int:
    """Bytes of an array, or of all of a tuple's."""
    bits = 0
    for dtype, sizes in _ARRAY.findall(type_text):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        bits += count * _dtype_bits(dtype)
    return -(-bits // 8)


def _dtype_bits(dtype: str) -> int:
    if dtype == "pred" or dtype.startswith("f8"):
        return 8
    return int(dtype.lstrip("bcsuf"))
