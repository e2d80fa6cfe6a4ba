import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from lingvo_gshard.core import json_records
from lingvo_gshard.input import manifest


@pytest.fixture
def copy(data_dir, tmp_path):
    return pathlib.Path(shutil.copytree(data_dir, tmp_path / "copy"))


def test_round_trip(copy):
    first = manifest.load(copy)
    manifest.save(first, copy)
    assert manifest.load(copy) == first
    assert [language.code for language in first.languages] == ["aa", "br", "cy"]
    assert first.language("br").num_examples("train") == 90
    assert first.language("br").num_examples("dev") == 0
    assert first.config["source_vocab_size"] == 420
    assert {"sentencepiece", "array_record"} <= set(first.library_versions)


def test_other_folders_are_refused_with_the_command_that_prepares_one(tmp_path):
    with pytest.raises(
        ValueError, match=r"no data folder .*none: prepare it with python -m data_p"
    ):
        manifest.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no manifest.json in .*: prepare it with python -m data"):
        manifest.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"languages": []}', '"x"', "3"])
def test_damaged_manifests_are_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest.json is not a manifest"):
        manifest.load(tmp_path)


def test_missing_fields_are_refused(copy):
    path = copy / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["source_vocabulary"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"is not a manifest: KeyError.*source_vocabulary"):
        manifest.load(copy)


def test_another_version_is_refused(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"version": 3', '"version": 2'))
    with pytest.raises(ValueError, match=r"has version 2, expected 3"):
        manifest.load(copy)


def test_missing_and_changed_files_are_refused(copy):
    model, files = copy / "vocab" / "target.model", manifest.load(copy).files()
    content = model.read_bytes()
    manifest.verify(copy, files)
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    manifest.verify(copy, files, contents=False)
    with pytest.raises(ValueError, match=r"target.model has SHA-256"):
        manifest.verify(copy, files)
    model.write_bytes(content[:-1])
    for contents in (True, False):
        with pytest.raises(ValueError, match=rf"target.model has {len(content) - 1} bytes"):
            manifest.verify(copy, files, contents=contents)
    model.unlink()
    with pytest.raises(ValueError, match=r"target.model is missing"):
        manifest.verify(copy, files, contents=False)


def test_one_bad_file_of_many_is_found(tmp_path):
    for number in range(300):
        (tmp_path / str(number)).write_bytes(b"x")
    files = [manifest.describe_file(tmp_path, str(number)) for number in range(300)]
    manifest.verify(tmp_path, files, contents=False)
    manifest.verify(tmp_path, files)
    (tmp_path / "217").write_bytes(b"y")
    manifest.verify(tmp_path, files, contents=False)
    with pytest.raises(ValueError, match=r"/217 has SHA-256"):
        manifest.verify(tmp_path, files)
    (tmp_path / "217").unlink()
    with pytest.raises(ValueError, match=r"/217 is missing"):
        manifest.verify(tmp_path, files, contents=False)


def test_loading_reads_the_manifest_once_and_looks_at_no_other_file(copy, monkeypatch):
    calls, read = [], json_records.read
    monkeypatch.setattr(json_records, "read", lambda *args: calls.append(args) or read(*args))
    first = manifest.load(copy)
    for file in first.files():
        (copy / file.path).unlink()
    assert manifest.load(copy) is first
    assert sum(kind is manifest.Manifest for kind, _ in calls) == 1
    changed = dataclasses.replace(first, library_versions={"x": "1"})
    manifest.save(changed, copy)
    assert manifest.load(copy) == changed


def test_unknown_language_is_refused(data_dir):
    with pytest.raises(ValueError, match=r"language 'zz' is not in the data: it holds aa, br, cy"):
        manifest.load(data_dir).language("zz")


def test_imports_no_framework():
    code = (
        "import sys; from lingvo_gshard.input import manifest, example_codec; "
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'jax', 'grain')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
