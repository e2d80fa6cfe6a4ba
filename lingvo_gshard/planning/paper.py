"""What the paper printed about its models: Tables 1 to 3, Figure 6, and numbers of section 5.

Table 1 prints 36684 and 12228 experts in total, but 18 and 6 layers of 2048 experts are 36864 and
12288; we take these for slips. Likewise, we read the MoE(36E, 128L) of section 4.4, with 37 billion
weights, as MoE(128E, 36L).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """A row of Tables 1 to 3, and the experiment registered for it. What is not printed is None.

    `layers` are those of the encoder and the decoder together, `experts` those of a layer, and
    `total_experts` those of all layers, as printed. Batches of 4M and 1M tokens are taken as 2^22
    and 2^20. Core-years and days are those of 10^12 tokens; `bleu` is the average of the languages.
    """

    name: str
    model: str
    cores: int
    layers: int
    experts: int | None
    total_experts: int | None
    weights: float
    batch_tokens: int
    steps_per_sec: float | None
    core_years: float | None
    days: float | None
    bleu: float | None


_MIXTURES = (
    # experts, layers, total_experts, weights, batch_tokens, steps_per_sec, core_years, days, bleu
    (128, 12, 768, 12.5e9, 2**20, 2.16, 1.9, 5.4, 36.7),
    (512, 12, 3072, 50e9, 2**20, 3.28, 4.9, 3.5, 40.0),
    (2048, 12, 12228, 200e9, 2**22, 2.15, 7.5, 1.4, 41.3),
    (128, 36, 2304, 37e9, 2**20, 0.67, 6.1, 17.3, 39.0),
    (512, 36, 9216, 150e9, 2**20, 1.05, 15.5, 11.0, 43.7),
    (2048, 36, 36684, 600e9, 2**22, 0.72, 22.4, 4.0, 44.3),
    (2048, 60, 61440, 1e12, 2**22, None, None, None, None),  # Its batch is not printed.
)

# Each has one expert of a layer on each core.
FAMILY = tuple(
    PaperRun(
        f"MoE({experts}E, {layers}L)", f"m4.MoE{experts}E{layers}L", experts, layers, experts, *rest
    )
    for experts, layers, *rest in _MIXTURES
)

DENSE = PaperRun("T(96L)", "m4.T96L", 2048, 96, None, None, 2.3e9, 2**22, None, 235.5, 42, 36.9)

# Figure 6: the weights of a bilingual baseline.
BASELINE_WEIGHTS = 0.4e9

# Section 5.2, for a forward pass: AllToAll's share of the MoE and Transformer layers at 128 and
# 2048 experts, the growth of AllToAll and of the whole pass, and the share of the roofline.
ALL_TO_ALL_SHARE = {128: 0.16, 2048: 0.36}
ALL_TO_ALL_GROWTH = 3.75
STEP_GROWTH = 1.7
ROOFLINE_SHARE = {128: 0.70, 2048: 0.48}
# Section 5.3, Figure 9: AllToAll from 16 to 2048 partitions; AllReduce is about constant.
FIGURE_9_BYTES = (8 * 2**20, 32 * 2**20)
FIGURE_9_ALL_TO_ALL_GROWTH = 9.0
