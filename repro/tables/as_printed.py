"""Figure 1, Tables 1 to 3 and section 5.1's shares, as the paper printed them.

We read the MoE(36E, 128L) of section 4.4, with 37 billion weights, as MoE(128E, 36L).
"""

import dataclasses

# Figures 1 and 6: a bilingual model for each of 100 languages, and the cost of all of them.
NUM_BASELINES = 100
BASELINE_WEIGHTS = 0.4e9
BASELINES_BLEU = 30.8
BASELINES_CORE_YEARS = 29.0

# Table 2's columns: cross entropies that training reached.
CROSS_ENTROPIES = (0.7, 0.6, 0.5)

# Section 5.1: the share of all cycles spent recomputing activations, by encoder and decoder layers.
RECOMPUTED_SHARES = {12: 0.0, 24: 0.0, 36: 0.28, 60: 0.34}


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """A model of Tables 1 to 3 and the experiment registered for it. None means not printed.

    BLEU is the average over 100 languages to English on a held-out test set (section 4.4).
    """

    cores: int  # Each core has one expert per layer, unless the model is dense.
    layers: int  # The layers of the encoder and the decoder together.
    weights: float
    batch_tokens: int  # 4M and 1M are taken as 2^22 and 2^20.
    steps_per_sec: float | None
    core_years: float | None  # The cost of 10^12 tokens.
    number: str = "*"  # The paper's Id.
    printed_experts: int | None = None  # Table 1's experts in all layers; None if dense.
    days: float | None = None
    bleu: float | None = None
    delta_bleu: float | None = None  # The gain over the bilingual baselines (Figure 6).
    billion_tokens: tuple[float | None, ...] = (None,) * len(CROSS_ENTROPIES)  # Table 2.

    @property
    def is_dense(self) -> bool:
        """Whether the model lacks experts."""
        return self.printed_experts is None

    @property
    def name(self) -> str:
        """The model's name in the paper."""
        return f"T({self.layers}L)" if self.is_dense else f"MoE({self.cores}E, {self.layers}L)"

    @property
    def model(self) -> str:
        """The name of the registered experiment."""
        return f"m4.T{self.layers}L" if self.is_dense else f"m4.MoE{self.cores}E{self.layers}L"

    @property
    def experts(self) -> int:
        """The experts of all layers, which every other layer has; 0 if the model is dense."""
        return 0 if self.is_dense else self.cores * self.layers // 2

    @property
    def token_secs(self) -> float | None:
        """The time of a step per token of a core's batch, where tokens count as in Table 3."""
        if self.steps_per_sec is None:
            return None
        return self.cores / self.steps_per_sec / self.batch_tokens


FAMILY = (
    PaperRun(
        cores=128,
        layers=12,
        weights=12.5e9,
        batch_tokens=2**20,
        steps_per_sec=2.16,
        core_years=1.9,
        number="(6)",
        printed_experts=768,
        days=5.4,
        bleu=36.7,
        delta_bleu=5.9,
        billion_tokens=(995, None, None),
    ),
    PaperRun(
        cores=512,
        layers=12,
        weights=50e9,
        batch_tokens=2**20,
        steps_per_sec=3.28,
        core_years=4.9,
        number="(4)",
        printed_experts=3072,
        days=3.5,
        bleu=40.0,
        delta_bleu=9.2,
        billion_tokens=(141, 486, None),
    ),
    PaperRun(
        cores=2048,
        layers=12,
        weights=200e9,
        batch_tokens=2**22,
        steps_per_sec=2.15,
        core_years=7.5,
        number="(2)",
        printed_experts=12_228,  # This must mean 12,288.
        days=1.4,
        bleu=41.3,
        delta_bleu=10.5,
        billion_tokens=(176, 484, 1780),
    ),
    PaperRun(
        cores=128,
        layers=36,
        weights=37e9,
        batch_tokens=2**20,
        steps_per_sec=0.67,
        core_years=6.1,
        number="(5)",
        printed_experts=2304,
        days=17.3,
        bleu=39.0,
        delta_bleu=8.2,
        billion_tokens=(321, 1074, None),
    ),
    PaperRun(
        cores=512,
        layers=36,
        weights=150e9,
        batch_tokens=2**20,
        steps_per_sec=1.05,
        core_years=15.5,
        number="(3)",
        printed_experts=9216,
        days=11.0,
        bleu=43.7,
        delta_bleu=12.9,
        billion_tokens=(66, 170, 567),
    ),
    PaperRun(
        cores=2048,
        layers=36,
        weights=600e9,
        batch_tokens=2**22,
        steps_per_sec=0.72,
        core_years=22.4,
        number="(1)",
        printed_experts=36_684,  # This must mean 36,864.
        days=4.0,
        bleu=44.3,
        delta_bleu=13.5,
        billion_tokens=(82, 175, 542),
    ),
    # This model is only in Table 1; its batch is not printed.
    PaperRun(
        cores=2048,
        layers=60,
        weights=1e12,
        batch_tokens=2**22,
        steps_per_sec=None,
        core_years=None,
        printed_experts=61_440,
    ),
)
# The dense model of Figures 1 and 6 and Table 3. Its 300,000 steps took its core-years (footnote
# 10).
DENSE = PaperRun(
    cores=2048,
    layers=96,
    weights=2.3e9,
    batch_tokens=2**22,
    steps_per_sec=None,
    core_years=235.5,
    days=42.0,
    bleu=36.9,
    delta_bleu=6.1,
)

# Section 5.1 names models of 24 layers in addition to the tables' models.
MODELS_OF_24_LAYERS = ("m4.MoE128E24L", "m4.MoE512E24L", "m4.MoE2048E24L")
