"""A program that is being drawn, with the tensors that its next operator may take."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

from tools.fuzz_programs.program import FLOATS, Argument
from tools.fuzz_programs.registry import NoOperands

MAX_ELEMENTS = 4000
# Most sizes are uneven, and some are smaller than the number of devices.
SIZES = (1, 2, 3, 4, 5, 5, 6, 7, 7, 8, 9, 10, 11, 12, 13, 13, 16, 17, 19, 24)
_DTYPES = ("float32",) * 7 + ("bfloat16",) * 2 + ("int32", "bool")


@dataclasses.dataclass(frozen=True)
class Choices:
    """What programs are drawn from."""

    families: tuple[str, ...] = ()  # The families of operators, by name; all if empty.
    zero_share: float = 0.015  # The share of sizes that are 0.


EVERYTHING = Choices()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the program: its name, and the properties that operators need."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int = 0  # Integers are from 0 to below - 1, or any if it is 0.

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Draft:
    """The tensors so far, and functions that draw operands from them."""

    def __init__(
        self, rng: random.Random, letters: Sequence[str], choices: Choices = EVERYTHING
    ) -> None:
        self.rng = rng
        self.arguments: list[Argument] = []
        self.tensors: list[Tensor] = []
        self._letters = letters
        self._choices = choices

    def draw_size(self) -> int:
        """Returns a random size of a dim."""
        if self.rng.random() < self._choices.zero_share:
            return 0
        return self.rng.choice(SIZES)

    def draw_shape(self, max_rank: int = 4) -> tuple[int, ...]:
        """Returns a random shape of at least one dim."""
        while True:
            shape = [self.draw_size() for _ in range(self.rng.randint(1, max_rank))]
            if math.prod(shape) <= MAX_ELEMENTS // 2:
                return tuple(shape)

    def draw_dtype(self) -> str:
        """Returns a random dtype, most often float32."""
        return self.rng.choice(_DTYPES)

    def draw_dims(self, rank: int) -> str:
        """Returns a random letter for each dim, most of them `_`."""
        dims = ["_"] * rank
        if rank and self.rng.random() < 0.7:
            for letter in self.rng.sample(self._letters, self.rng.randint(1, len(self._letters))):
                dims[self.rng.randrange(rank)] = letter
        return "".join(dims)

    def add_argument(self, shape: Sequence[int], dtype: str, below: int = 0) -> Tensor:
        """Adds an argument to the program, with random dims."""
        if dtype == "int32" and not below:
            below = self.rng.choice((3, 7, 50))
        if math.prod(shape) > MAX_ELEMENTS:
            raise NoOperands
        name = f"a{len(self.arguments)}"
        dims = self.draw_dims(len(shape))
        self.arguments.append(Argument(name, tuple(shape), dtype, dims, below))
        tensor = Tensor(name, tuple(shape), dtype, below)
        self.tensors.append(tensor)
        return tensor

    def pick(
        self,
        dtypes: Sequence[str] = FLOATS,
        min_rank: int = 1,
        max_rank: int = 5,
        where: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> Tensor:
        """Returns one of the tensors, a late one more often than an early one.

        Raises NoOperands if no tensor meets the conditions.
        """
        fitting = []
        for tensor in self.tensors:
            if tensor.dtype in dtypes and min_rank <= tensor.rank <= max_rank and where(tensor):
                fitting.append(tensor)
        if not fitting:
            raise NoOperands
        if self.rng.random() < 0.5:
            return fitting[-1]
        return self.rng.choice(fitting)

    def pick_full(self, **conditions: object) -> Tensor:
        """Returns one of the tensors, like `pick`, but never an empty one."""
        return self.pick(where=lambda tensor: tensor.size > 0, **conditions)

    def like(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Returns a tensor of this shape and dtype; it may be a new argument."""
        fitting = []
        for tensor in self.tensors:
            if tensor.shape == tuple(shape) and tensor.dtype == dtype:
                fitting.append(tensor)
        if fitting and self.rng.random() < 0.6:
            return self.rng.choice(fitting)
        return self.add_argument(shape, dtype)

    def ids(self, shape: Sequence[int], below: int) -> Tensor:
        """Returns integers from 0 to below - 1; they may be a new argument."""
        if below < 1:
            raise NoOperands
        fitting = []
        for tensor in self.tensors:
            if tensor.shape == tuple(shape) and 0 < tensor.below <= below:
                fitting.append(tensor)
        if fitting and self.rng.random() < 0.7:
            return self.rng.choice(fitting)
        return self.add_argument(shape, "int32", below)

    def axis(self, tensor: Tensor) -> int:
        """Returns a random dim of a tensor, sometimes counted from its end."""
        axis = self.rng.randrange(tensor.rank)
        if self.rng.random() < 0.25:
            axis -= tensor.rank
        return axis

    def axes(self, tensor: Tensor) -> list[int]:
        """Returns one or more random dims of a tensor."""
        return self.rng.sample(range(tensor.rank), self.rng.randint(1, tensor.rank))

    def chance(self, share: float) -> bool:
        """Returns True with this probability."""
        return self.rng.random() < share
