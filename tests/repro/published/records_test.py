"""The stored records of published steps, and the refusal of bad records."""

import pytest

from repro.published import records

_GOOD = """
[sources.paper]
where = "owner/project file@commit"
differs = ["another compiler"]

[models.small]
layers = 2
M = 16
H = 32
N = 2
D = 8
vocab = 64

[[records]]
id = "small.8"
source = "paper"
model = "small"
topology = "v5e:2x4"
rows = 16
length = 128
fsdp = 8
published = "4096 tokens/s"
tokens_per_sec = 4096.0
"""


def _load(folder, text):
    path = folder / "records.toml"
    path.write_text(text)
    return records.load(path)


def test_all_kept_records_have_the_published_number_of_weights():
    kept = records.load()
    assert len(kept) >= 40
    counted = [record for record in kept if record.weights is not None]
    assert len(counted) >= 40
    for record in counted:
        # MaxText's formula leaves out the norms.
        norms = record.model.norms if record.id.startswith("maxtext.") else 0
        assert record.model.weights - norms == record.weights, record.id


def test_other_models_have_their_published_number_of_weights():
    weights = {record.model_name: record.model.weights for record in records.load()}
    assert weights["llama2-7b"] == 6_738_415_616
    assert weights["llama2-13b"] == 13_015_864_320
    assert weights["llama2-70b"] == 68_976_648_192
    assert weights["llama3-8b"] == 8_030_261_248
    assert weights["llama3-70b"] == 70_553_706_496


def test_a_step_that_ran_out_of_memory_has_no_time(tmp_path):
    failed = _GOOD.replace("tokens_per_sec = 4096.0", "fits = false")
    (record,) = _load(tmp_path, failed)
    assert not record.fits and record.measured_secs is None


def test_a_step_takes_as_long_as_its_tokens(tmp_path):
    (record,) = _load(tmp_path, _GOOD)
    assert record.measured_secs == 16 * 128 / 4096
    assert record.run.attention == "splash" and record.run.remat == "full"
    assert record.machine == "v5e" and record.differs == ("another compiler",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows = 16", "", "record small.8: it has no 'rows'"),
        ("rows = 16", "rows = 12", "record small.8: rows=12: expected a multiple of 8"),
        ("rows = 16", "row = 16", "record small.8: unknown field 'row'."),
        ("fsdp = 8", "fsdp = 4", "tensor is 4, but v5e:2x4 has 8 devices."),
        ('model = "small"', 'model = "big"', "model 'big' is not one of small."),
        ('source = "paper"', "source = 3", "source=3: expected a text."),
        ("4096.0", "0.0", "tokens_per_sec=0: expected more than 0, of a step that fits."),
        ("tokens_per_sec = 4096.0", "", "it has neither 'tokens_per_sec' nor 'fits'."),
        ("layers = 2", "layers = 0", "record small.8: layers=0: expected 1 or more."),
        ("M = 16", "width = 16", "record small.8: Model.__init__() got an unexpected keyword"),
        ("rows = 16", "rows = ", "records.toml: Invalid value"),
    ],
)
def test_a_bad_record_is_named_in_one_line(tmp_path, old, new, message):
    assert old in _GOOD
    with pytest.raises(ValueError) as error:
        _load(tmp_path, _GOOD.replace(old, new))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_id_is_used_once(tmp_path):
    entry = _GOOD[_GOOD.index("[[records]]") :]
    with pytest.raises(ValueError, match=r"record small\.8: another record has this id\."):
        _load(tmp_path, _GOOD + entry)
