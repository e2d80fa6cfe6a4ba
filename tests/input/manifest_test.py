import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from lingvo_gshard.input import manifest
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.text_rows import TextInput
from xla_spmd.files import digests, json_records


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


def test_an_old_manifest_without_a_kind_is_of_pairs(copy):
    fields = json.loads((copy / "manifest.json").read_text())
    del fields["digest"], fields["kind"]
    for language in fields["languages"]:
        for of_split in language["records"].values():
            del of_split["num_target_byte_tokens"], of_split["num_target_bytes"]
            for shard in of_split["shards"]:
                del shard["num_target_tokens"]
    digests.write_json(copy / "manifest.json", fields.pop("version"), fields)
    data = TranslationInput.Manifest(copy)
    assert data.language("br").num_examples("train") == 90
    with pytest.raises(
        ValueError, match="holds data of kind parallel, but TextInput reads kind text"
    ):
        TextInput.Manifest(copy)


def test_other_folders_are_refused_with_the_command_that_prepares_one(tmp_path):
    with pytest.raises(ValueError, match=r"no data folder .*none: prepare it with gshard prepare"):
        manifest.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no manifest.json in .*: prepare it with gshard pre"):
        manifest.load(tmp_path)


def test_a_damaged_manifest_and_one_of_another_version_are_refused(copy):
    path = copy / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"config": {}}))
    with pytest.raises(
        ValueError, match=r"manifest.json is damaged: its contents do not match its digest"
    ):
        manifest.load(copy)
    path.write_text(json.dumps(fields | {"version": 3}))
    with pytest.raises(ValueError, match=r"manifest.json has version 3, expected 4; make the fold"):
        manifest.load(copy)


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
    with pytest.raises(ValueError, match=r"language 'zz' is not in the data, which has aa, br, cy"):
        manifest.load(data_dir).language("zz")


def test_imports_no_framework():
    code = (
        "import sys; from lingvo_gshard.input import manifest, example_codec; "
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'jax', 'grain')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
