import collections

import numpy as np
import pytest

from lingvo_gshard.input import manifest, mixture
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.bpe_tokenizer import load_pair
from lingvo_gshard.input.mixture import Mixture
from lingvo_gshard.input.records import RecordSource

_COUNTS = {"aa": 512, "br": 90, "cy": 16}


def _source(data_dir, codes=None):
    languages = mixture.languages_of(manifest.load(data_dir), "train", codes)
    return RecordSource(data_dir, *(language.records["train"] for language in languages))


def _mixture(data_dir, codes=None, **changes):
    settings = {"temperature": 5.0, "max_repeats": None, "shuffle": True, "seed": 3} | changes
    return Mixture(_source(data_dir, codes), TranslationInput.Params().Set(**settings))


def _ids(examples):
    return [tuple(example.source_ids.tolist()) for example in examples]


def _probabilities(counts, temperature, max_repeats=None):
    return mixture.sampling(counts, temperature, max_repeats).probabilities


def test_weights_by_hand():
    weights = _probabilities

    # 32 ** (1/5) = 2, 1, 243 ** (1/5) = 3.
    np.testing.assert_allclose(weights([32, 1, 243], 5.0), [2 / 6, 1 / 6, 3 / 6])
    np.testing.assert_allclose(weights([30, 10], 1.0), [0.75, 0.25])
    np.testing.assert_allclose(weights([900, 4], 2.0), [30 / 32, 2 / 32])
    np.testing.assert_allclose(weights([900, 4], 1e9), [0.5, 0.5])


def test_repeats_are_limited_and_the_rest_is_shared():
    # Without a limit, each language gets a third of 100 draws, and a single example 33 of them.
    # A limit of 4 draws per example leaves 92 draws to the first language.
    limited = _probabilities([98, 1, 1], 1e9, max_repeats=4.0)
    np.testing.assert_allclose(limited, [0.92, 0.04, 0.04])
    # The first language's surplus pushes the second one over its own limit of 2 * 10 / 100.
    limited = _probabilities([1, 10, 89], 3.0, max_repeats=2.0)
    np.testing.assert_allclose(limited, [0.02, 0.2, 0.78])
    # With a limit of 1, nothing repeats: the proportions are the data's.
    np.testing.assert_allclose(_probabilities([30, 10], 5.0, 1.0), [0.75, 0.25])


def test_limited_languages_are_named_from_the_smallest_on(data_dir):
    languages = mixture.languages_of(manifest.load(data_dir), "train", None)
    assert [language.code for language in languages] == list(_COUNTS)
    for max_repeats, want in ((None, []), (20.0, []), (5.0, ["cy"]), (1.5, ["cy", "br"])):
        params = TranslationInput.Params().Set(max_repeats=max_repeats)
        assert mixture.limited_languages(languages, list(_COUNTS.values()), params) == want


def test_impossible_weights_are_refused():
    for counts, temperature, max_repeats, message in (
        ([3], 0.5, None, r"temperature 0.5: expected at least 1"),
        ([3], 5.0, 0.5, r"max_repeats 0.5: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            _probabilities(counts, temperature, max_repeats)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("start", [0, 12_345])
def test_every_part_of_the_stream_has_the_right_proportions(data_dir, temperature, start):
    source, _ = load_pair(data_dir)
    drawn = _mixture(data_dir, temperature=temperature).read(start, start + 500)
    found = collections.Counter(source.decode(ids)[:2] for ids in _ids(drawn))
    weights = {name: count ** (1 / temperature) for name, count in _COUNTS.items()}
    for name, weight in weights.items():
        assert abs(found[name] - 500 * weight / sum(weights.values())) <= 1
    # The languages are interleaved.
    first_half = collections.Counter(source.decode(ids)[:2] for ids in _ids(drawn[:250]))
    assert all(abs(2 * first_half[name] - found[name]) <= 4 for name in weights)


def test_adjacent_parts_join(data_dir):
    mixed = _mixture(data_dir)
    whole = _ids(mixed.read(100, 400))
    parts = _ids(mixed.read(100, 237)) + _ids(mixed.read(237, 400))
    assert sorted(parts) == sorted(whole)


def test_each_epoch_of_a_language_has_each_example_once_in_another_order(data_dir):
    mixed = _mixture(data_dir, codes=["br"])
    ids = _ids(mixed.read(0, 271))
    epochs = [ids[:90], ids[90:180], ids[180:270]]
    assert len(set(epochs[0])) == 90
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_languages_of_equal_size_are_shuffled_differently(data_dir):
    records = manifest.load(data_dir).language("br").records["train"]
    params = TranslationInput.Params().Set(temperature=1.0, max_repeats=None, shuffle=True, seed=1)
    mixed = Mixture(RecordSource(data_dir, records, records), params)
    ids = _ids(mixed.read(0, 180))
    assert set(collections.Counter(ids).values()) == {2}
    assert ids[0::2] != ids[1::2]


def test_unknown_splits_and_empty_languages_are_refused(data_dir):
    data = manifest.load(data_dir)
    for split, codes, message in (
        ("valid", None, "split 'valid': expected one of train, dev, test"),
        ("test", None, "no language has examples in split 'test'"),
        ("dev", ["aa", "br"], "language br has no examples in split 'dev'"),
        ("train", ["xx"], "language 'xx' is not in the data"),
        ("train", ["aa", "br", "aa"], "one is given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture.languages_of(data, split, codes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 300, 1 << 16, (1 << 16) + 1, 70_000])
def test_shuffles_of_any_size_are_permutations(size):
    found = mixture.shuffled(np.arange(size), size, seed=5)
    assert found.dtype.kind in "iu"
    np.testing.assert_array_equal(np.sort(found), np.arange(size))
    assert size == 1 or (found != mixture.shuffled(np.arange(size), size, seed=6)).any()
    some = np.array([size - 1, 0])
    np.testing.assert_array_equal(mixture.shuffled(some, size, seed=5), found[some])
