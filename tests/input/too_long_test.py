import itertools
import logging

import numpy as np
import pytest

from lingvo_gshard.input import manifest, too_long
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.records import RecordSource


def _params(data_dir, **changes):
    p = TranslationInput.Params().Set(data_dir=data_dir, batch_size=6, source_len=16, target_len=12)
    return p.Set(**changes)


def _counted(data_dir, split, source_len, target_len):
    """Returns, by language, the numbers of all pairs and of too long ones, from the records."""
    counted = {}
    for language in manifest.load(data_dir).languages:
        if language.num_examples(split):
            source = RecordSource(data_dir, language.records[split])
            pairs = source.read(np.arange(len(source)))
            num_longer = 0
            for pair in pairs:
                is_longer = len(pair.source_ids) > source_len or len(pair.target_ids) > target_len
                num_longer += is_longer
            counted[language.code] = (len(pairs), num_longer)
    return counted


def test_the_share_equals_the_records(data_dir):
    counted = _counted(data_dir, "train", 16, 12)
    shares = TranslationInput.TooLong(_params(data_dir))
    assert shares == pytest.approx({code: longer / n for code, (n, longer) in counted.items()})
    assert 0 < min(shares.values()) < max(shares.values()) < 1


def test_training_reports_skipped_pairs_and_evaluation_cut_ones(data_dir, caplog):
    for settings, fate in (({}, "are never trained on"), ({"repeat": False}, "are cut")):
        split = "dev" if settings else "train"
        lengths = {"source_len": 16, "target_len": 12}
        counted = _counted(data_dir, split, *lengths.values())
        num_pairs, num_longer = (sum(numbers) for numbers in zip(*counted.values(), strict=True))
        too_long._warn_once.cache_clear()
        caplog.clear()

        # Only once, however often the input is opened.
        for _ in range(2):
            p = _params(data_dir, split=split, max_too_long_share=0.9, **settings)
            p.Instantiate().close()
        (told,) = [record.getMessage() for record in caplog.records if "longer" in record.msg]
        assert told.startswith(f"split {split}: {num_longer / num_pairs:.1%} of the pairs (")
        rows = "are longer than rows of source_len 16 and target_len 12"
        assert told.endswith(f") {rows}, and {fate}.")
        assert caplog.records[0].levelno == logging.WARNING


def test_a_small_share_is_not_rounded_to_nothing():
    shares = {"fr": 4e-5, "de": 0.12, "cs": 0.0}
    few = too_long.TooLong(shares, {"fr": 100_000, "de": 10, "cs": 10}, is_estimated=False)
    assert str(few) == "0.005% of the pairs (de 12.0%, fr 0.004%)"


def test_a_share_above_the_limit_is_refused_in_training_only(data_dir):
    short = {"source_len": 14, "target_len": 9}
    told = r"\(\w+ \d+.*\) are longer than rows of source_len 14 .* max_too_long_share from 0.2"
    with pytest.raises(ValueError, match=told):
        _params(data_dir, **short).Instantiate()
    _params(data_dir, **short, max_too_long_share=1.0).Instantiate().close()
    _params(data_dir, **short, split="dev", repeat=False).Instantiate().close()


def test_nothing_is_reported_if_all_pairs_fit(data_dir, caplog):
    too_long._warn_once.cache_clear()
    _params(data_dir, source_len=90, target_len=80).Instantiate().close()
    assert not [record for record in caplog.records if "longer" in record.msg]


def test_a_spread_of_very_many_files_is_read(data_dir, monkeypatch):
    (language,) = manifest.load(data_dir).languages[:1]
    shards = [manifest.Shard(None, number, 10) for number in range(10)]
    records = {"train": manifest.Records(tuple(shards), 0, 0, 0)}
    many = manifest.Language("xx", records, {}, {})
    read = []

    def read_lengths(folder, chosen):
        read.extend(shard.lengths for shard in chosen)
        return np.array(list(itertools.islice(itertools.cycle([[5, 5], [50, 5]]), 10)))

    monkeypatch.setattr(too_long, "read_lengths", read_lengths)
    monkeypatch.setattr(too_long, "_MAX_FILES", 4)
    found = too_long.too_long(_params(data_dir), [many])
    assert read == [0, 3, 6, 9]
    assert str(found) == "about 50.0% of the pairs (xx 50.0%)"
    assert language.code != "xx"
