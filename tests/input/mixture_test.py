import collections
import dataclasses

import numpy as np
import pytest

from lingvo_gshard.input import manifest, mixture
from lingvo_gshard.input.tokenizer import load_pair

_ENDLESS = mixture.MixtureConfig(
    split="train", languages=None, temperature=5.0, shuffle=True, repeat=True, seed=3
)


def _source_ids(stream, index):
    example = stream[index]
    assert example is not None
    return tuple(example.source_ids.tolist())


def _languages_drawn(data_dir, config, count):
    source, _ = load_pair(data_dir)
    stream = mixture.examples(data_dir, manifest.load(data_dir), config)
    return collections.Counter(source.decode(_source_ids(stream, i))[:2] for i in range(count))


def test_weights_by_hand():
    # 32 ** (1/5) = 2, 1, 243 ** (1/5) = 3.
    np.testing.assert_allclose(
        mixture.temperature_weights([32, 1, 243], 5.0), [2 / 6, 1 / 6, 3 / 6]
    )
    np.testing.assert_allclose(mixture.temperature_weights([30, 10], 1.0), [0.75, 0.25])
    np.testing.assert_allclose(mixture.temperature_weights([900, 4], 2.0), [30 / 32, 2 / 32])


def test_weights_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match=r"temperature 0.5: expected at least 1"):
        mixture.temperature_weights([3], 0.5)
    with pytest.raises(ValueError, match=r"example counts \[3, 0\]"):
        mixture.temperature_weights([3, 0], 5.0)
    with pytest.raises(ValueError, match=r"example counts \[\]"):
        mixture.temperature_weights([], 5.0)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_stream_has_the_weights_proportions(data_dir, temperature):
    counts = {"aa": 512, "br": 90, "cy": 16}
    config = dataclasses.replace(_ENDLESS, temperature=temperature)
    drawn = _languages_drawn(data_dir, config, 1000)
    weights = {name: count ** (1 / temperature) for name, count in counts.items()}
    for name, weight in weights.items():
        assert abs(drawn[name] / 1000 - weight / sum(weights.values())) < 0.02


def test_each_epoch_of_a_language_has_each_example_once_in_another_order(data_dir):
    config = dataclasses.replace(_ENDLESS, languages=("br",))
    stream = mixture.examples(data_dir, manifest.load(data_dir), config)
    epochs = [[_source_ids(stream, e * 90 + i) for i in range(90)] for e in range(3)]
    assert len(set(epochs[0])) == 90
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_one_pass_in_order_has_the_languages_one_after_the_other(data_dir):
    config = dataclasses.replace(_ENDLESS, split="dev", shuffle=False, repeat=False)
    source, _ = load_pair(data_dir)
    stream = mixture.examples(data_dir, manifest.load(data_dir), config)
    texts = [source.decode(_source_ids(stream, i)).split() for i in range(len(stream))]
    expected = [("aa", str(i)) for i in range(41)] + [("cy", str(i)) for i in range(7)]
    assert [(words[0], words[-1]) for words in texts] == expected


def test_the_seed_is_all_that_a_stream_depends_on(data_dir):
    data = manifest.load(data_dir)

    def first(seed):
        stream = mixture.examples(data_dir, data, dataclasses.replace(_ENDLESS, seed=seed))
        return [_source_ids(stream, i) for i in range(50)]

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_unknown_splits_and_empty_languages_are_refused(data_dir):
    data = manifest.load(data_dir)
    for changes, message in (
        ({"split": "valid"}, "split 'valid': expected one of train, dev, test"),
        ({"split": "test"}, "no language has examples in split 'test'"),
        ({"split": "dev", "languages": ("aa", "br")}, "language br has no examples in split 'dev'"),
        ({"languages": ("xx",)}, "language 'xx' is not in the data"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture.examples(data_dir, data, dataclasses.replace(_ENDLESS, **changes))
