"""A run that is killed: what is seen of it, how its processes shall end, and its story."""

import json
from signal import SIGABRT, SIGKILL, SIGTERM

import pytest

from tools.disturbed_run import Kill, Layout, News, Run, Story, check_ended


def _log(folder, steps):
    """Another log in the old one's place, as a trainer begins; then a line a step."""
    path = folder / "train_metrics.jsonl"
    path.unlink(missing_ok=True)
    lines = [json.dumps({"step": step, "metrics": {"loss": 1 / step}}) for step in steps]
    new = folder / "new"
    new.write_text("".join(line + "\n" for line in lines) + '{"step": 99, "me')
    new.rename(path)


def test_layouts():
    assert [Layout.parse(text) for text in ("4", "4/2")] == [Layout(4, 1), Layout(4, 2)]


def test_calls_are_new_once_the_log_is_another(tmp_path):
    run = Run(tmp_path)
    assert run.losses() == {} and News(run).calls() == []
    _log(tmp_path, (5, 10, 15))
    assert run.losses() == {5: 0.2, 10: 0.1, 15: 1 / 15}
    news = News(run)
    assert news.calls() == []
    (tmp_path / "kept").hardlink_to(tmp_path / "train_metrics.jsonl")  # Its inode stays taken.
    _log(tmp_path, (5, 10))
    assert news.calls() == []
    with (tmp_path / "train_metrics.jsonl").open("w") as file:
        file.write("".join(json.dumps({"step": step}) + "\n" for step in (5, 10, 15)))
    assert [call["step"] for call in news.calls()] == [15]


def test_a_partial_checkpoint_of_an_earlier_process_is_no_news(tmp_path):
    run, folder = Run(tmp_path), tmp_path / "checkpoints"
    (folder / "10").mkdir(parents=True)
    (folder / "10/digests.json").touch()
    (folder / "20").mkdir()
    news = News(run)
    assert len(run.partial_checkpoints()) == 1 and not news.has_partial_checkpoint()
    assert run.saved_step() == 10
    (folder / "30.partial").mkdir()
    assert news.has_partial_checkpoint()


def _kill(**fields):
    return Kill(
        **{
            "moment": "step",
            "before": 0,
            "after": 5,
            "secs": 1.0,
            "others_secs": 0.0,
            "first_call_secs": None,
            "cut_short": False,
            "status": -9,
            **fields,
        }
    )


def test_a_story_goes_on_and_is_of_one_command(tmp_path):
    story = Story(tmp_path / "soak.jsonl", {"kills": 3})
    story.note_run("whole", 7.0)
    story.note_kill(_kill(first_call_secs=4.0))
    story.note_kill(_kill(first_call_secs=3.0))
    again = Story(tmp_path / "soak.jsonl", {"kills": 3})
    assert (again.secs, again.kills) == (story.secs, story.kills)
    assert again.start_secs(9.0) == 3.0
    assert Story(tmp_path / "other.jsonl", {}).start_secs(9.0) == 9.0
    with pytest.raises(ValueError, match="is of {'kills': 3}; choose another --out"):
        Story(tmp_path / "soak.jsonl", {"kills": 4})


@pytest.mark.parametrize(
    ("sent", "moment", "status", "others"),
    [
        (SIGKILL, "step", 1, []),  # It failed by itself.
        (SIGKILL, "save", -SIGKILL, [1]),
        (SIGKILL, "step", -SIGKILL, [-SIGABRT]),
        (SIGTERM, "step", -SIGTERM, []),
        (SIGTERM, "step", 75, [69]),
    ],
)
def test_processes_that_end_otherwise_than_they_should_are_told(sent, moment, status, others):
    with pytest.raises(RuntimeError, match=f"{sent.name} in a {moment}"):
        check_ended(sent, moment, status, others)


def test_processes_that_end_as_they_should():
    check_ended(SIGKILL, "step", -SIGKILL, [69])
    check_ended(SIGKILL, "start", -SIGKILL, [-SIGKILL])
    check_ended(SIGTERM, "save", 75, [75])
    check_ended(SIGTERM, "start", -SIGTERM, [])
