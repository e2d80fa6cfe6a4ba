"""Table 3 as the paper printed it: its mixtures of experts.

We read the MoE(36E, 128L) of section 4.4, with 37 billion weights, as MoE(128E, 36L).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """A row of Table 3, and the experiment registered for it. What is not printed is None."""

    cores: int  # Each has one expert of a layer.
    layers: int  # Those of the encoder and the decoder together.
    weights: float
    batch_tokens: int  # 4M and 1M are taken as 2^22 and 2^20.
    steps_per_sec: float | None
    core_years: float | None  # Of 10^12 tokens.

    @property
    def name(self) -> str:
        """The model's name in the paper."""
        return f"MoE({self.cores}E, {self.layers}L)"

    @property
    def model(self) -> str:
        """The name of the registered experiment."""
        return f"m4.MoE{self.cores}E{self.layers}L"

    @property
    def token_secs(self) -> float | None:
        """The time of a step for each target token of a core."""
        if self.steps_per_sec is None:
            return None
        return self.cores / self.steps_per_sec / self.batch_tokens


FAMILY = (
    PaperRun(128, 12, 12.5e9, 2**20, 2.16, 1.9),
    PaperRun(512, 12, 50e9, 2**20, 3.28, 4.9),
    PaperRun(2048, 12, 200e9, 2**22, 2.15, 7.5),
    PaperRun(128, 36, 37e9, 2**20, 0.67, 6.1),
    PaperRun(512, 36, 150e9, 2**20, 1.05, 15.5),
    PaperRun(2048, 36, 600e9, 2**22, 0.72, 22.4),
    PaperRun(2048, 60, 1e12, 2**22, None, None),  # Its batch is not printed.
)
