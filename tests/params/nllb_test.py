"""The released models have exactly the weights that were published, counted by formula."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.model import placement


def _count(vocab, dim, hidden, layers, num_experts=0, every=0):
    """The weights of a model with this many layers on each side; M2M-100's own arithmetic."""
    attention = 4 * (dim * dim + dim)
    norm = 2 * dim
    feed_forward = 2 * dim * hidden + hidden + dim
    sparse = layers // every if every else 0
    experts = num_experts * feed_forward + dim * num_experts
    feed_forwards = (layers - sparse) * feed_forward + sparse * experts
    encoder = layers * (attention + 2 * norm) + feed_forwards + norm
    decoder = layers * (2 * attention + 3 * norm) + feed_forwards + norm
    return vocab * dim + encoder + decoder


@pytest.mark.parametrize(
    ("name", "sizes", "published"),
    [
        ("MoE54B", (256206, 2048, 8192, 24, 128, 4), 54_500_569_088),
        ("Dense3B", (256206, 2048, 8192, 24), 3_344_863_232),
        ("Dense1B", (256206, 1024, 8192, 24), 1_370_638_336),
        ("Dense600M", (256206, 1024, 4096, 12), 615_073_792),
        ("M2m418M", (128112, 1024, 4096, 12), 483_905_536),
        ("M2m1B", (128112, 1024, 8192, 24), 1_239_470_080),
        ("M2m12B", (128112, 4096, 16384, 24), None),
    ],
)
def test_counts_of_weights(name, sizes, published):
    """All but the last were counted in transformers' own models, on torch's meta device."""
    got = placement.num_weights(registry.get_params(f"nllb.{name}"))
    assert got == _count(*sizes)
    assert published is None or got == published
