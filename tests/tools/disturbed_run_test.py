"""The log of kills of a run, the watcher of its progress, and the checks of how it ends."""

import json
from signal import SIGABRT, SIGKILL, SIGTERM

import pytest

from tools.disturbed_run import Kill, KillLog, Layout, ProgressWatcher, Run, check_exit_statuses


def _replace_log(folder, steps):
    """Replaces the log like a trainer that begins, with a line for each step."""
    path = folder / "train_metrics.jsonl"
    path.unlink(missing_ok=True)
    lines = [json.dumps({"step": step, "metrics": {"loss": 1 / step}}) for step in steps]
    new = folder / "new"
    new.write_text("".join(line + "\n" for line in lines) + '{"step": 99, "me')
    new.rename(path)


def test_layouts():
    assert [Layout.parse(text) for text in ("4", "4/2")] == [Layout(4, 1), Layout(4, 2)]
    for text in ("2/2/2", "0", "-1", "4/0", "x"):
        with pytest.raises(ValueError, match=f"layout {text}: expected PARTITIONS or"):
            Layout.parse(text)


def test_only_calls_after_the_log_was_replaced_are_new(tmp_path):
    run = Run(tmp_path)
    assert run.losses() == {} and ProgressWatcher(run).calls() == []
    _replace_log(tmp_path, (5, 10, 15))
    assert run.losses() == {5: 0.2, 10: 0.1, 15: 1 / 15}
    watcher = ProgressWatcher(run)
    assert watcher.calls() == []
    (tmp_path / "kept").hardlink_to(tmp_path / "train_metrics.jsonl")  # Its inode stays in use.
    _replace_log(tmp_path, (5, 10))
    assert watcher.calls() == []
    with (tmp_path / "train_metrics.jsonl").open("w") as file:
        file.write("".join(json.dumps({"step": step}) + "\n" for step in (5, 10, 15)))
    assert [call["step"] for call in watcher.calls()] == [15]


def test_an_incomplete_checkpoint_of_an_earlier_process_is_not_new(tmp_path):
    run, folder = Run(tmp_path), tmp_path / "checkpoints"
    (folder / "10").mkdir(parents=True)
    (folder / "10" / "commit_success.txt").touch()
    (folder / "20.partial").mkdir()
    watcher = ProgressWatcher(run)
    assert len(run.incomplete_checkpoints()) == 1 and not watcher.has_incomplete_checkpoint()
    assert run.saved_step() == 10
    (folder / "30.partial").mkdir()
    assert watcher.has_incomplete_checkpoint()


def _kill(first_call_secs):
    return Kill("step", 0, 5, 1.0, 0.0, first_call_secs, cut_short=False, status=-9)


def test_a_log_of_kills_continues_for_the_same_settings_only(tmp_path):
    log = KillLog(tmp_path / "soak.jsonl", {"kills": 3})
    log.add_run("whole", 7.0)
    log.add_kill(_kill(first_call_secs=4.0))
    log.add_kill(_kill(first_call_secs=3.0))
    again = KillLog(tmp_path / "soak.jsonl", {"kills": 3})
    assert (again.run_secs, again.kills) == (log.run_secs, log.kills)
    assert again.start_secs(9.0) == 3.0
    assert KillLog(tmp_path / "other.jsonl", {}).start_secs(9.0) == 9.0
    with pytest.raises(ValueError, match="has other settings: {'kills': 3}; choose another --out"):
        KillLog(tmp_path / "soak.jsonl", {"kills": 4})


@pytest.mark.parametrize(
    ("sent", "moment", "status", "other_statuses"),
    [
        (SIGKILL, "step", 1, []),  # It failed without the kill.
        (SIGKILL, "save", -SIGKILL, [1]),
        (SIGKILL, "step", -SIGKILL, [-SIGABRT]),
        (SIGTERM, "step", -SIGTERM, []),
    ],
)
def test_unexpected_exit_statuses_are_reported(sent, moment, status, other_statuses):
    with pytest.raises(RuntimeError, match=f"{sent.name} in a {moment}"):
        check_exit_statuses(sent, moment, status, other_statuses)


def test_expected_exit_statuses_pass():
    check_exit_statuses(SIGKILL, "step", -SIGKILL, [69])
    check_exit_statuses(SIGKILL, "start", -SIGKILL, [-SIGKILL])
    check_exit_statuses(SIGTERM, "save", 75, [75])
    check_exit_statuses(SIGTERM, "start", -SIGTERM, [])
