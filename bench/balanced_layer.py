"""A layer of experts with balanced routing: its sizes, and its arrays, which are made from seeds.

The benchmark's process and its peer's each make the arrays, because they take gigabytes. So this
module imports NumPy alone.

T tokens, E experts, K of them for a token, C rows of an expert, M model, H hidden.
"""

import dataclasses
import math

import numpy as np

# The dims of one expert's weight, by its name in an MoELayer.
EXPERT_WEIGHTS = {"wi": "MH", "wi_gate": "MH", "wo": "HM"}

# A chosen expert's logit; the token's next choice has one that is lower by the step. Others have
# noise, so that no rounding changes a choice.
_LOGIT = 4.0
_STEP = 0.1
_NOISE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancedLayer:
    """The sizes of a layer whose experts get equally many tokens.

    Raises ValueError if they cannot, and if a token has fewer numbers than there are experts.
    """

    tokens: int  # T
    M: int
    H: int
    E: int
    K: int

    def __post_init__(self) -> None:
        if self.tokens * self.K % self.E:
            raise ValueError(
                f"tokens={self.tokens}: {self.tokens * self.K} choices cannot be shared evenly by "
                f"{self.E} experts."
            )
        if not self.K <= self.E <= self.M:
            raise ValueError(f"E={self.E}: expected from K={self.K} to M={self.M} experts.")

    @property
    def rows(self) -> int:
        """C, the rows of each expert."""
        return self.tokens * self.K // self.E

    @property
    def weight_count(self) -> int:
        """The number of scalars in the experts' weights."""
        return len(EXPERT_WEIGHTS) * self.E * self.M * self.H


def router(layer: BalancedLayer) -> np.ndarray:
    """Returns wg, float32 [M, E]: the first E numbers of a token are its logits."""
    return np.eye(layer.M, layer.E, dtype=np.float32)


def shape(layer: BalancedLayer, name: str) -> tuple[int, int]:
    """Returns the shape of one expert's weight of a name in EXPERT_WEIGHTS."""
    sizes = {"M": layer.M, "H": layer.H}
    rows, columns = EXPERT_WEIGHTS[name]
    return sizes[rows], sizes[columns]


def expert_weight(layer: BalancedLayer, name: str, expert: int) -> np.ndarray:
    """Returns one expert's weight, float32 [M, H] or [H, M]."""
    rows, columns = shape(layer, name)
    rng = np.random.default_rng([list(EXPERT_WEIGHTS).index(name), expert])
    scale = np.float32(1 / math.sqrt(rows))
    return rng.standard_normal((rows, columns), np.float32) * scale


def inputs(layer: BalancedLayer) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens x and the gradient d_y of the layer's output, each float32 [T, M].

    The tokens, in a random order, choose the experts in turn: the first has the experts 0 to K - 1,
    the second the next K, and so on.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((layer.tokens, layer.M), np.float32)
    d_y = rng.standard_normal((layer.tokens, layer.M), np.float32)

    x[:, : layer.E] *= _NOISE
    place = rng.permutation(layer.tokens)
    for k in range(layer.K):
        expert = (layer.K * place + k) % layer.E
        x[np.arange(layer.tokens), expert] += np.float32(_LOGIT - k * _STEP)
    return x, d_y
