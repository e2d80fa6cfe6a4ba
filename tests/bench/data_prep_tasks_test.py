import pytest

from bench import data_prep_tasks


@pytest.mark.slow
def test_ten_times_as_many_pairs_open_about_ten_times_as_many_files(tmp_path):
    small, large = (data_prep_tasks._num_opens(tmp_path, number) for number in (10**8, 10**9))
    # 10^9 pairs make 30518 chunks, each read and written once more, and 60 groups and ranges.
    assert large == 2 * 30518 + 2 * 60**2 + 5 * 60
    assert large < 11.1 * small


def test_an_engine_measures_its_tasks(tmp_path):
    meter = data_prep_tasks.Meter(tmp_path)
    tasks = [lambda: (tmp_path / "x").write_bytes(bytes(5000)), (tmp_path / "x").read_bytes]
    assert len(list(meter(tasks))) == 2
    assert [task.opens for task in meter.tasks] == [1, 1]
    assert [5000 <= task.written_bytes < 9000 for task in meter.tasks] == [True, False]
