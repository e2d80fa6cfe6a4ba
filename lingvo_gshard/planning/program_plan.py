"""What a plan of anybody's program holds: see any_program.py."""

import dataclasses

from lingvo_gshard.planning.plan import Buffer, StepCost, Times


@dataclasses.dataclass(frozen=True)
class RoleMemory:
    """The arguments of one role, on one device."""

    arguments: int
    gib: float
    donated_gib: float  # The part whose memory the results may take.


@dataclasses.dataclass(frozen=True)
class AnyMemory:
    """GiB of one device in a call."""

    capacity: float  # What the compiler leaves to a program.
    roles: dict[str, RoleMemory]
    outputs: float  # Results that do not lie in donated arguments.
    temporaries: float
    peak: float  # The most held at once; of a refused program, what the compiler wanted.


@dataclasses.dataclass(frozen=True)
class SentFrom:
    """All collectives of a kind from one layer in a call."""

    kind: str
    count: int
    bytes: int  # Of the results, on one device.
    source: str  # The layer.
    line: str | None  # Where it was written, such as `model.py:12`; None if that was not kept.


@dataclasses.dataclass(frozen=True)
class AnyPlan:
    """What a call of somebody else's program needs and costs on a topology."""

    program: str
    topology: str
    mesh: dict[str, int]
    fits: bool
    memory_gib: AnyMemory
    largest_buffers: tuple[Buffer, ...]
    compile_secs: float

    # Of a program that fits.
    cost: StepCost | None = None  # By users' categories and kinds of operations.
    collectives: tuple[SentFrom, ...] = ()  # The most bytes first.
    secs_by_pass: dict[str, Times] = dataclasses.field(default_factory=dict)  # By categories.Pass.
    suspicious: tuple[str, ...] = ()  # What a well partitioned program would not have.
