"""What the paper printed of its family: Tables 1 to 3, Figure 6, and numbers of section 5's text.

Table 1's totals of experts, 36684 and 12228, are not the 18 and 6 layers of 2048 experts that
its other columns give, 36864 and 12288: taken for slips. So is the MoE(36E, 128L) of section 4.4,
with 37 billion weights, for MoE(128E, 36L).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRun:
    """A row of Tables 1 to 3. What is not printed is None.

    Attributes:
      name: as printed.
      model: the registered experiment.
      cores: TPU v3 cores.
      layers: encoder's and decoder's.
      experts: of a layer.
      total_experts: of all layers, as printed.
      weights: as printed.
      batch_tokens: tokens of a batch; 4M and 1M are taken for 2^22 and 2^20.
      steps_per_sec, core_years, days: of training with 10^12 tokens.
      bleu: the average over the languages.
    """

    name: str
    model: str
    cores: int
    layers: int
    experts: int | None = None
    total_experts: int | None = None
    weights: float
    batch_tokens: int
    steps_per_sec: float | None = None
    core_years: float | None = None
    days: float | None = None
    bleu: float | None = None


FAMILY = (
    PaperRun(
        name="MoE(2048E, 36L)",
        model="m4.MoE2048E36L",
        cores=2048,
        layers=36,
        experts=2048,
        total_experts=36684,
        weights=600e9,
        batch_tokens=2**22,
        steps_per_sec=0.72,
        core_years=22.4,
        days=4.0,
        bleu=44.3,
    ),
    PaperRun(
        name="MoE(2048E, 12L)",
        model="m4.MoE2048E12L",
        cores=2048,
        layers=12,
        experts=2048,
        total_experts=12228,
        weights=200e9,
        batch_tokens=2**22,
        steps_per_sec=2.15,
        core_years=7.5,
        days=1.4,
        bleu=41.3,
    ),
    PaperRun(
        name="MoE(512E, 36L)",
        model="m4.MoE512E36L",
        cores=512,
        layers=36,
        experts=512,
        total_experts=9216,
        weights=150e9,
        batch_tokens=2**20,
        steps_per_sec=1.05,
        core_years=15.5,
        days=11.0,
        bleu=43.7,
    ),
    PaperRun(
        name="MoE(512E, 12L)",
        model="m4.MoE512E12L",
        cores=512,
        layers=12,
        experts=512,
        total_experts=3072,
        weights=50e9,
        batch_tokens=2**20,
        steps_per_sec=3.28,
        core_years=4.9,
        days=3.5,
        bleu=40.0,
    ),
    PaperRun(
        name="MoE(128E, 36L)",
        model="m4.MoE128E36L",
        cores=128,
        layers=36,
        experts=128,
        total_experts=2304,
        weights=37e9,
        batch_tokens=2**20,
        steps_per_sec=0.67,
        core_years=6.1,
        days=17.3,
        bleu=39.0,
    ),
    PaperRun(
        name="MoE(128E, 12L)",
        model="m4.MoE128E12L",
        cores=128,
        layers=12,
        experts=128,
        total_experts=768,
        weights=12.5e9,
        batch_tokens=2**20,
        steps_per_sec=2.16,
        core_years=1.9,
        days=5.4,
        bleu=36.7,
    ),
    # Its batch is not printed.
    PaperRun(
        name="MoE(2048E, 60L)",
        model="m4.MoE2048E60L",
        cores=2048,
        layers=60,
        experts=2048,
        total_experts=61440,
        weights=1e12,
        batch_tokens=2**22,
    ),
)

DENSE = PaperRun(
    name="T(96L)",
    model="m4.T96L",
    cores=2048,
    layers=96,
    weights=2.3e9,
    batch_tokens=2**22,
    core_years=235.5,
    days=42,
    bleu=36.9,
)

# Figure 6: a bilingual baseline's weights.
BASELINE_WEIGHTS = 0.4e9

# Section 5.2, of a forward pass: AllToAll's share of the MoE and Transformer layers at 128 and
# 2048 experts, how much longer it and the whole take; the share of the roofline at both.
ALL_TO_ALL_SHARE = {128: 0.16, 2048: 0.36}
ALL_TO_ALL_GROWTH = 3.75
STEP_GROWTH = 1.7
ROOFLINE_SHARE = {128: 0.70, 2048: 0.48}
# Section 5.3, Figure 9: AllToAll from 16 to 2048 partitions; AllReduce is about constant.
FIGURE_9_BYTES = (8 * 2**20, 32 * 2**20)
FIGURE_9_ALL_TO_ALL_GROWTH = 9.0
