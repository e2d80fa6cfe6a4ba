import dataclasses

import numpy as np
import pytest

from data_prep import records as writer
from lingvo_gshard.input import manifest, records


def test_reads_what_was_written_in_any_order(tmp_path):
    rng = np.random.default_rng(4)
    examples = [
        (rng.integers(0, 9000, rng.integers(1, 12)).tolist(), [i, 70000 if i % 3 else 5, 2])
        for i in range(57)
    ]
    counts = writer.write(tmp_path / "x" / "aa.array_record", examples)
    assert counts.num_examples == 57
    assert counts.num_target_tokens == 3 * 57
    assert counts.num_source_tokens == sum(len(source) for source, _ in examples)
    file = manifest.describe_file(tmp_path, "x/aa.array_record")
    entry = manifest.Records(file, **dataclasses.asdict(counts))
    source = records.RecordSource(tmp_path, entry)
    assert len(source) == 57
    for index in rng.permutation(57):
        np.testing.assert_array_equal(source[index].source_ids, examples[index][0])
        np.testing.assert_array_equal(source[index].target_ids, examples[index][1])
    for index in (-1, 57):
        with pytest.raises(IndexError, match=f"no record {index} of 57"):
            source[index]
    with pytest.raises(ValueError, match=r"holds 57 records, the manifest says 58"):
        records.RecordSource(tmp_path, dataclasses.replace(entry, num_examples=58))
