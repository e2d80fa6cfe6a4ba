"""The sizes of a decoder, its weights by name, and the settings of a training step."""

import dataclasses
import math

ACTIVATIONS = ("relu", "gelu", "silu_gated")
POSITIONS = ("rope", "learned", "none")
# The results of a layer that are kept for the backward pass: the ones that a run names, the results
# of products with weights, or also the attention kernel's results. Elementwise results are always
# recomputed, which costs no more than reading them would.
REMAT = ("full", "minimal", "none")
# The names of a layer's results.
RESULTS = ("input", "query", "key", "value", "attention", "output", "up", "gate", "down")
ATTENTION = ("splash", "flash", "whole")
# Each device gathers all experts for its own tokens, or tokens travel to their experts' devices.
EXPERTS = ("gathered", "exchanged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a decoder. Raises ValueError for sizes that do not fit together."""

    layers: int
    M: int
    H: int
    N: int
    D: int
    vocab: int
    K: int = 0  # The number of key and value heads; defaults to N.
    E: int = 0  # The number of experts, each of H hidden units; 0 for a dense decoder.
    chosen: int = 0  # The number of experts of a token.
    activation: str = "relu"
    positions: str = "rope"
    max_length: int = 0  # The number of learned positions.
    tied: bool = True  # Whether the softmax shares the embedding's weights.
    biases: bool = False  # Whether products and norms have biases; norms then subtract the mean.

    def __post_init__(self) -> None:
        if not self.K:
            object.__setattr__(self, "K", self.N)
        for name in ("layers", "M", "H", "N", "K", "D", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more.")
        if self.N % self.K:
            raise ValueError(f"K={self.K}: expected a divisor of N={self.N}.")
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("positions", self.positions, POSITIONS)
        if (self.max_length > 0) != (self.positions == "learned"):
            raise ValueError(f"max_length={self.max_length}: expected for learned positions alone.")
        self._check_experts()

    def _check_experts(self) -> None:
        if not 0 <= self.chosen <= self.E or (self.E > 0) != (self.chosen > 0):
            raise ValueError(f"chosen={self.chosen}: expected 1 to E={self.E} with experts alone.")
        if self.E and (self.activation != "silu_gated" or self.biases):
            raise ValueError(
                f"E={self.E}: experts are only known with activation='silu_gated' and no biases."
            )

    @property
    def weights(self) -> int:
        """The number of all weights."""
        return sum(math.prod(shape) for shape in weight_shapes(self).values())

    @property
    def norms(self) -> int:
        """The number of weights that are scales of norms; some sources do not count them."""
        return (2 * self.layers + 1) * self.M


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of a decoder's step. Raises ValueError for incompatible settings."""

    rows: int  # The rows of a batch, over all devices.
    length: int  # The length of a row, in tokens.
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    microbatches: int = 1
    remat: str = "full"
    kept: tuple[str, ...] = ()  # Items of RESULTS to keep with remat="full".
    attention: str = "whole"  # Pallas's splash on TPUs, its flash attention on GPUs, or logits.
    dtype: str = "bfloat16"  # The activations' dtype.
    weight_dtype: str = "float32"  # The dtype of weights and slots.
    experts: str = "gathered"  # An item of EXPERTS; "exchanged" splits the experts along fsdp.

    def __post_init__(self) -> None:
        _check_choice("remat", self.remat, REMAT)
        _check_choice("attention", self.attention, ATTENTION)
        _check_choice("experts", self.experts, EXPERTS)
        for name in self.kept:
            _check_choice("kept", name, RESULTS)
        if self.kept and self.remat != "full":
            raise ValueError(f"remat={self.remat!r}: expected full beside kept results.")
        parts = self.data * self.fsdp * self.microbatches
        if self.rows < 1 or self.rows % parts:
            raise ValueError(
                f"rows={self.rows}: expected a multiple of {parts}, data * fsdp * microbatches."
            )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def rows_at_once(self) -> int:
        """The rows of a microbatch on one device."""
        return self.rows // (self.data * self.fsdp * self.microbatches)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}.")


def weight_letters(model: Model) -> dict[str, str]:
    """Returns the dims of every weight by name. Dims that begin with L belong to the layers."""
    letters = {
        "embedding": "VM",
        "attention_norm": "LM",
        "query": "LMND",
        "key": "LMKD",
        "value": "LMKD",
        "output": "LNDM",
        "mlp_norm": "LM",
        "up": "LMH",
        "down": "LHM",
        "final_norm": "M",
    }
    if model.activation == "silu_gated":
        letters["gate"] = "LMH"
    if model.E:
        letters |= {"router": "LME", "up": "LEMH", "gate": "LEMH", "down": "LEHM"}
    if model.positions == "learned":
        letters["positions"] = "TM"
    if not model.tied:
        letters["head"] = "VM"
    if model.biases:
        letters |= {
            "attention_norm_bias": "LM",
            "query_bias": "LND",
            "key_bias": "LKD",
            "value_bias": "LKD",
            "output_bias": "LM",
            "mlp_norm_bias": "LM",
            "up_bias": "LH",
            "down_bias": "LM",
            "final_norm_bias": "M",
        }
    return letters


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight by name."""
    sizes = {"L": model.layers, "T": model.max_length, "V": model.vocab}
    for letter in "MHNKDE":
        sizes[letter] = getattr(model, letter)
    shapes = {}
    for name, letters in weight_letters(model).items():
        shapes[name] = tuple(sizes[letter] for letter in letters)
    return shapes
