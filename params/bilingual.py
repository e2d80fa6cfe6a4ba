"""The bilingual baselines (section 4.2): a dense Transformer for each language.

The paper names the layouts (footnote 9) and states 0.4B weights (Figure 6). GPipe (Huang et al.
2019, arXiv:1811.06965, section 5) has this Transformer-Big: T(6, H=8192, A=16), M=1024, 400M
weights with 64000 pieces, batches of 260 thousand tokens. The baselines of Arivazhagan et al. 2019
(arXiv:1907.05019) have this layout with 32000 pieces per side, about 375M weights, as here.
Transformer-Base, for languages with little text, is from Vaswani et al. 2017 (arXiv:1706.03762).
This command trains one of them; each docstring states the number of partitions:

    gshard train --model=bilingual.TransformerBig --mode=train_and_eval \
        --data_dir=DATA --logdir=RUN --num_partitions=8
"""

from lingvo_gshard import registry
from params.experiment import TranslationExperiment


@registry.register
class TransformerBig(TranslationExperiment):
    """For languages with much text: 375.2 M weights, the paper's 0.4B, on 8 partitions."""

    NUM_LAYERS = 12
    MODEL_DIM = 1024
    HIDDEN_DIM = 8192
    NUM_HEADS = 16
    HEAD_DIM = 64
    NUM_EXPERTS = None
    SOURCE_VOCAB_SIZE = 32_000
    TARGET_VOCAB_SIZE = 32_000
    BATCH_SIZE = 1024  # Rows of 256: 2^18 tokens, GPipe's 260 thousand.
    SOURCE_LEN = 256
    TARGET_LEN = 256
    MAX_STEPS = 300_000


@registry.register
class TransformerBase(TransformerBig):
    """For languages with little text, with more dropout: 93.2 M weights on 8 partitions."""

    MODEL_DIM = 512
    HIDDEN_DIM = 2048
    NUM_HEADS = 8
    DROPOUT = 0.3
    BATCH_SIZE = 128
    MAX_STEPS = 100_000
