"""What the paper printed of its family: Tables 1 and 3, and the numbers in section 5's text.

Table 1's totals of experts, 36684 and 12228, are not the 18 and 6 layers of 2048 experts that
its other columns give, 36864 and 12288; they are taken for slips.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """A row of Tables 1 and 3.

    Attributes:
      name: as printed.
      model: the registered experiment.
      cores: TPU v3 cores, as many as experts a layer.
      layers: encoder's and decoder's.
      weights: as printed.
      batch_tokens: tokens of a batch; 4M and 1M are taken for 2^22 and 2^20.
      steps_per_sec, core_years, days: as printed; None where it was not trained to the end.
    """

    name: str
    model: str
    cores: int
    layers: int
    weights: float
    batch_tokens: int
    steps_per_sec: float | None
    core_years: float | None
    days: float | None


FAMILY = (
    PaperRun("MoE(2048E, 36L)", "m4.MoE2048E36L", 2048, 36, 600e9, 2**22, 0.72, 22.4, 4.0),
    PaperRun("MoE(2048E, 12L)", "m4.MoE2048E12L", 2048, 12, 200e9, 2**22, 2.15, 7.5, 1.4),
    PaperRun("MoE(512E, 36L)", "m4.MoE512E36L", 512, 36, 150e9, 2**20, 1.05, 15.5, 11.0),
    PaperRun("MoE(512E, 12L)", "m4.MoE512E12L", 512, 12, 50e9, 2**20, 3.28, 4.9, 3.5),
    PaperRun("MoE(128E, 36L)", "m4.MoE128E36L", 128, 36, 37e9, 2**20, 0.67, 6.1, 17.3),
    PaperRun("MoE(128E, 12L)", "m4.MoE128E12L", 128, 12, 12.5e9, 2**20, 2.16, 1.9, 5.4),
    PaperRun("MoE(2048E, 60L)", "m4.MoE2048E60L", 2048, 60, 1e12, 2**22, None, None, None),
)

# Section 5.2, of a forward pass: AllToAll's share of the MoE and Transformer layers at 128 and
# 2048 experts, how much longer it and the whole take; the share of the roofline at both.
ALL_TO_ALL_SHARE = {128: 0.16, 2048: 0.36}
ALL_TO_ALL_GROWTH = 3.75
STEP_GROWTH = 1.7
ROOFLINE_SHARE = {128: 0.70, 2048: 0.48}
# Section 5.3, Figure 9: AllToAll from 16 to 2048 partitions; AllReduce is about constant.
FIGURE_9_BYTES = (8 * 2**20, 32 * 2**20)
FIGURE_9_ALL_TO_ALL_GROWTH = 9.0
