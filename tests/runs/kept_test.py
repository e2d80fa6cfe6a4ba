"""The bundles that are kept with a run: their names, damage, and which of them stay."""

import dataclasses
import shutil

from lingvo_gshard.runs import kept
from lingvo_gshard.runs.launch import DataFacts, Launch
from lingvo_gshard.translation import bundle

_LAUNCH = Launch("toy.Dense4L", ("decode.beam_size=2",), "/data", DataFacts(30, 40, ("de",)))


def _save(logdir, step, about="{}"):
    folder = logdir / "checkpoints" / str(step)
    (folder / "about").mkdir(parents=True)
    (folder / "about/metadata").write_text(about)
    (folder / "commit_success.txt").touch()


def test_a_bundle_is_named_after_the_newest_checkpoint_and_all_that_it_depends_on(tmp_path):
    logdir = str(tmp_path)
    _save(tmp_path, 4)
    asked = [
        (_LAUNCH, 2),
        (_LAUNCH, 1),
        (_LAUNCH.changed(["decode.beam_size=3"]), 2),
        (dataclasses.replace(_LAUNCH, facts=DataFacts(30, 40, ("fr",))), 2),
    ]
    found = [kept.folder(launch, logdir, count) for launch, count in asked]
    assert len(set(found)) == 4 and kept.folder(_LAUNCH, logdir, 2) == found[0]
    assert all(each.parent == tmp_path / "translate" for each in found)
    assert all(each.name.startswith("4-") for each in found)
    _save(tmp_path, 6)
    assert kept.folder(_LAUNCH, logdir, 2).name.startswith("6-")
    shutil.rmtree(tmp_path / "checkpoints/6")
    assert kept.folder(_LAUNCH, logdir, 2) == found[0]
    shutil.rmtree(tmp_path / "checkpoints/4")
    _save(tmp_path, 4, '{"of": "another run"}')
    assert kept.folder(_LAUNCH, logdir, 2) not in found


def test_bundles_of_older_checkpoints_are_deleted(tmp_path):
    old, new = "0123456789abcdef", "abcdef0123456789"
    for name in (f"4-{old}", f"6-{old}", f"6-{new}", f"60-{old}", "4-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").touch()
    kept.delete_older(tmp_path / f"6-{new}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4-best", f"6-{old}", f"6-{new}"]


def test_a_bundle_that_is_missing_or_damaged_counts_as_none(tmp_path, caplog):
    assert kept.load(tmp_path / "6-ab") is None and not caplog.messages
    (tmp_path / "6-ab").mkdir()
    (tmp_path / "6-ab" / bundle._SPEC).write_text("{")
    assert kept.load(tmp_path / "6-ab") is None
    assert "bundle.json is damaged" in caplog.text and "It is made again." in caplog.text
