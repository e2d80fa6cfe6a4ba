import pytest

from bench import start


@pytest.mark.slow
def test_a_linked_folder_reads_like_a_prepared_one(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "_RECORDS", 40)
    monkeypatch.setattr(start, "_BATCH_SIZE", 1)
    monkeypatch.setattr(start, "_BATCHES", 512)  # A batch has one row; a pool has 512.
    start.write(tmp_path, 300)
    costs = start.measure(str(tmp_path))
    assert costs["files"] == len(list(tmp_path.glob("records/train/*.array_record"))) >= 300
    assert costs["pairs"] == 40 * costs["files"]
    assert costs["files opened a batch after 1000000"] > 0
    assert 0 < costs["secs to the manifest"] < costs["secs to the first batch"]
