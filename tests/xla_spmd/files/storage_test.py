"""Local copies of folders in buckets, with servers that answer like Google's and Amazon's."""

import hashlib
import logging
import os
import re
import sys
import tempfile

import fsspec
import pytest

from tests import buckets
from xla_spmd.files import digests, storage


@pytest.fixture(scope="module", params=[buckets.gcs, buckets.s3])
def bucket(request):
    fsspec.spec.AbstractFileSystem.clear_instance_cache()
    with request.param() as url:
        yield url
    fsspec.spec.AbstractFileSystem.clear_instance_cache()


def _there(url):
    files, root = fsspec.core.url_to_fs(url)
    return {name.removeprefix(f"{root}/"): files.cat_file(name) for name in files.find(root)}


def _write(folder, **contents):
    for number, (name, text) in enumerate(contents.items()):
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(number, number))


def test_a_folder_on_disk_is_its_own_copy(tmp_path):
    with storage.working(tmp_path) as here:
        assert here == tmp_path
    assert storage.origin(tmp_path / "a") == storage.path(tmp_path / "a") == tmp_path / "a"
    assert storage.cached(tmp_path, "a/b", "any") == tmp_path / "a/b"
    storage.publish(tmp_path)


def test_a_number_is_refused_as_a_path():
    with pytest.raises(ValueError, match="a path: expected a str or a pathlib.Path, got int 3"):
        storage.expanded(3)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    storage.check_writable(tmp_path / "new/folder")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{tmp_path}/file is a file; a folder is expected"):
        storage.check_writable(tmp_path / "file/below")


@pytest.mark.slow
def test_changed_and_deleted_files_are_published(bucket):
    url = f"{bucket}/changes"
    with storage.working(url) as here:
        _write(here, a="1", b__c="2", b__d="3", lost__e="4")
        storage.publish(here / "b")
        assert _there(url) == {"a": b"1", "b/c": b"2", "b/d": b"3", "lost/e": b"4"}
        assert str(storage.origin(here / "b/c")) == f"{url}/b/c"
    assert not here.exists()
    with storage.working(f"{url}/") as here:
        assert (here / "b/c").read_text() == "2"
        with (here / "a").open("a") as file:
            file.write("0")
        (here / "lost/e").unlink()
        _write(here, f="5")
        (here / "half.partial").touch()
        (here / "train.lock").touch()
    assert _there(url) == {"a": b"10", "b/c": b"2", "b/d": b"3", "f": b"5"}


@pytest.mark.slow
def test_a_manifest_is_published_last(bucket, monkeypatch):
    order, put = [], storage._Copy._put

    def noting(self, times, name):
        put(self, times, name)
        order.append(name)

    monkeypatch.setattr(storage._Copy, "_put", noting)
    with storage.working(f"{bucket}/order") as here:
        _write(here, plan="", s__1__a="", s__1__whole="", s__0="", manifest="")
        os.utime(here / "s/0", ns=(9, 9))
    assert max(map(order.index, ("s/1/a", "s/1/whole"))) < order.index("s/0")
    assert order[-1] == "manifest"


def test_a_kept_copy_is_found_again_until_it_is_finished(bucket):
    url = f"{bucket}/kept"
    with pytest.raises(RuntimeError), storage.working(url, keep=True) as here:
        _write(here, plan="p")
        (here / ".unfinished").mkdir()
        raise RuntimeError
    assert _there(url) == {"plan": b"p"}
    with storage.working(url, keep=True) as again:
        assert again == here and (here / ".unfinished").exists()
    files, root = fsspec.core.url_to_fs(url)
    files.rm(f"{root}/plan")
    with storage.working(url, keep=True) as again:  # Deleted in the bucket, hence also here.
        assert again == here and not list(here.iterdir())
    assert not here.exists()


def test_files_of_data_are_kept_by_their_digest(bucket, capsys):
    url, digest = f"{bucket}/data", hashlib.sha256(b"text").hexdigest()
    with storage.working(url) as here:
        _write(here, records__a="text", records__b="other")
    found = [storage.cached(url, "records/a", digest) for _ in range(2)]
    assert found[0] == found[1] and found[0].read_text() == "text"
    assert capsys.readouterr().err.count(f"{url}: its files are copied to ") == 1
    with pytest.raises(ValueError, match="records/b has SHA-256 .*, expected 00"):
        storage.cached(url, "records/b", "00")
    with pytest.raises(OSError, match="records/c cannot be read"):
        storage.cached(url, "records/c", "11")


def test_sizes_are_checked_without_a_copy(bucket, monkeypatch):
    url = f"{bucket}/sizes"
    with storage.working(url) as here:
        _write(here, a="text")
    monkeypatch.setattr(storage, "cached", lambda *_: pytest.fail("it is copied"))
    files = [digests.File("a", 4, "?"), digests.File("a", 5, "?"), digests.File("b", 4, "?")]
    digests.verify(url, files[:1], contents=False)
    for file, message in zip(files[1:], ("a has 4 bytes, not the 5", "b is missing"), strict=True):
        with pytest.raises(ValueError, match=f"{url}/{message}"):
            digests.verify(url, [file], contents=False)


def test_a_bucket_that_cannot_be_written_loses_nothing(bucket, tmp_path, monkeypatch):
    leaving = bucket.replace("bucket", "leaving")
    files, root = fsspec.core.url_to_fs(leaving)
    files.mkdir(root)
    refused = pytest.raises(OSError, match=f"^{leaving}/run/a cannot be written; it is in ")
    with refused as told, storage.working(f"{leaving}/run") as here:
        _write(here, a="work")
        files.rmdir(root)
    assert "\n" not in str(told.value)
    assert str(here) in str(told.value) and (here / "a").read_text() == "work"
    absent = pytest.raises(OSError, match=f"^{leaving}/run cannot be read")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with absent, storage.working(f"{leaving}/run"):
        pytest.fail("a bucket that does not exist is noticed before the work")
    assert not list(tmp_path.iterdir())


def test_mistakes_name_the_bucket_and_not_the_copy(bucket):
    refused = pytest.raises(ValueError, match=f"^{bucket}/run/a: wrong")
    with refused, storage.working(f"{bucket}/run") as here:
        raise ValueError(f"{here}/a: wrong")


@pytest.mark.parametrize("name", ["gs://b/run[1]", "s3://b/all*/run", "s3://b/run?"])
def test_a_name_that_is_a_pattern_in_a_bucket_is_refused(name):
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: in buckets, names with .* patterns"):
        storage.path(name)


def test_a_package_does_not_log_its_errors():
    logger = logging.getLogger("gcsfs")
    logger.setLevel(logging.NOTSET)
    storage.path("gs://bucket/folder")
    assert not logger.isEnabledFor(logging.ERROR)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        ValueError, match=r"gs://a/b needs gcsfs: pip install 'lingvo_gshard\[gcs\]'"
    ):
        storage.path("gs://a/b")
