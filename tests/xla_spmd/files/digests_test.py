"""Written files are read back; a changed file is refused by name."""

import json

import pytest

from xla_spmd.files import digests


def test_missing_and_changed_files_are_refused(tmp_path):
    model, content = tmp_path / "target.model", b"pieces"
    model.write_bytes(content)
    files = [digests.describe(tmp_path, "target.model")]
    digests.verify(tmp_path, files)
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    digests.verify(tmp_path, files, contents=False)
    with pytest.raises(ValueError, match=r"target.model has SHA-256"):
        digests.verify(tmp_path, files)
    model.write_bytes(content[:-1])
    for contents in (True, False):
        with pytest.raises(ValueError, match=r"target.model has 5 bytes, not the 6 written"):
            digests.verify(tmp_path, files, contents=contents)
    model.unlink()
    with pytest.raises(ValueError, match=r"target.model is missing"):
        digests.verify(tmp_path, files, contents=False)


def test_one_bad_file_of_many_is_found(tmp_path):
    for number in range(300):
        (tmp_path / str(number)).write_bytes(b"x")
    files = [digests.describe(tmp_path, str(number)) for number in range(300)]
    digests.verify(tmp_path, files, contents=False)
    digests.verify(tmp_path, files)
    (tmp_path / "217").write_bytes(b"y")
    digests.verify(tmp_path, files, contents=False)
    with pytest.raises(ValueError, match=r"/217 has SHA-256"):
        digests.verify(tmp_path, files)
    (tmp_path / "217").unlink()
    with pytest.raises(ValueError, match=r"/217 is missing"):
        digests.verify(tmp_path, files, contents=False)


def test_json_reads_back_in_any_layout(tmp_path):
    path, fields = tmp_path / "a.json", {"b": [1, 2.5, None], "a": {"\u00e4": (3,)}}
    digests.write_json(path, 7, fields)
    want = {"version": 7, "b": [1, 2.5, None], "a": {"\u00e4": [3]}}
    assert digests.read_json(path, 7, dict) == want
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False))
    assert digests.read_json(path, 7, dict) == want


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.json is damaged: it is not a JSON object"),
        ("[]", "a.json is damaged: it is not a JSON object"),
        ("[" * 100_000, "a.json is damaged: it is not a JSON object .*nested too deeply"),
        ("\udcff", "a.json is damaged: it is not a JSON object"),
        ("{}", "a.json has no version, expected 2; make the folder again"),
        ('{"version": 9}', "a.json has version 9, expected 2; make the folder again"),
        (
            '{"version": 2, "digest": "0"}',
            "a.json is damaged: its contents do not match its digest",
        ),
    ],
)
def test_invalid_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        digests.read_json(path, 2, lambda fields: fields["name"].lower())
    assert "\n" not in str(error.value)


def test_every_changed_bit_is_found(tmp_path):
    path = tmp_path / "a.json"
    digests.write_json(path, 2, {"name": "x", "sizes": [1, 20]})
    content, want = path.read_bytes(), digests.read_json(path, 2, dict)
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert digests.read_json(path, 2, dict) == want  # White space.
        except ValueError as error:
            assert str(error).startswith(str(path))
