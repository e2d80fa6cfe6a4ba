"""Chunks of lines: dealt out to processes (threads in these tests), kept, resumed, identified."""

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lingvo_gshard.decoding.chunks import Parts
from lingvo_gshard.decoding.outcomes import Finish, Line, NoResultError
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.spmd import processes
from lingvo_gshard.spmd.specs import Share
from tests.decoding.reverser import Letters, Reverser
from xla_spmd.files import atomic_file

_BATCH = 2
_WINDOW = 16 * _BATCH


class _Killed(Exception):
    pass


def _best(found):
    return Line(found[0].text, found[0].finish)


class _Processes:
    """Threads in the role of processes: their collectives wait for all of them."""

    def __init__(self, count, monkeypatch):
        self.count, self._own = count, threading.local()
        self._values, self._barrier = [None] * count, threading.Barrier(count, timeout=30)
        monkeypatch.setattr(
            processes, "largest", lambda values: np.max(self._gathered(values), axis=0).tolist()
        )
        monkeypatch.setattr(processes, "of_first", lambda value: self._gathered(value)[0])
        monkeypatch.setattr(processes, "index", lambda: self._own.index)

    def _gathered(self, value):
        self._values[self._own.index] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def run(self, work):
        """Calls work(index) in each process; returns the results, or raises the first error."""

        def call(index):
            self._own.index = index
            try:
                return work(index)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            calls = [pool.submit(call, index) for index in range(self.count)]
        errors = [each.exception() for each in calls if each.exception()]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [each.result() for each in calls]


@dataclasses.dataclass
class _Done:
    """The results of several processes: their joint output, and the lines that each one encoded."""

    output: list[str]
    encoded: list[set[str]]


def _translate(
    folder, lines, count, monkeypatch, *, shares=None, text="a", calls=None, origin="reversed"
):
    """Translates with `count` processes; each one is killed after its number of `calls`."""
    shares = shares or [Share(i, count) for i in range(count)]

    def work(index):
        tokenizer, decoder = Letters(), Reverser(_BATCH * shares[index].count, (8,), shares[index])
        decoder.origin = {"weights": origin}
        limit = itertools.count(1)

        def limited(features):
            if next(limit) == calls:
                raise _Killed
            return decoder(features)

        limited.spec, limited.share, limited.origin = decoder.spec, decoder.share, decoder.origin
        translator = Translator(limited, tokenizer, tokenizer)
        assert translator.window == _WINDOW
        parts = Parts(folder, translator, _best, {"text": text})
        written = list(parts.lines(parts.write(iter(lines), len(lines))))
        return [line.text for line in written], tokenizer.encoded

    done = _Processes(count, monkeypatch).run(work)
    return _Done(done[0][0], [encoded for _, encoded in done])


def _lines(count):
    letters = ["".join(word) for word in itertools.product("abcdefg", repeat=4)]
    return [letters[i] if i % 5 else "" for i in range(count)]


def _reversed(lines):
    return [line[::-1] for line in lines]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_lines", [0, 1, _WINDOW, 5 * _WINDOW + 7])
def test_every_line_is_translated_once_by_one_process(tmp_path, monkeypatch, count, num_lines):
    lines = _lines(num_lines)
    done = _translate(tmp_path / "parts", lines, count, monkeypatch)
    assert done.output == _reversed(lines)
    for index, encoded in enumerate(done.encoded):
        own = {line for i, line in enumerate(lines) if i // _WINDOW % count == index}
        assert encoded == own - {""}


def test_processes_with_the_same_rows_translate_the_same_lines(tmp_path, monkeypatch):
    lines, written, write = _lines(3 * _WINDOW), [], atomic_file.write

    def noted(path, content):
        written.append(path.name)
        write(path, content)

    monkeypatch.setattr(atomic_file, "write", noted)
    shares = [Share(0, 2), Share(0, 2), Share(1, 2)]
    done = _translate(tmp_path / "parts", lines, 3, monkeypatch, shares=shares)
    assert done.output == _reversed(lines) and done.encoded[0] == done.encoded[1]
    assert sorted(written) == ["belongs_to.txt", *(f"part_{i:08}.txt" for i in range(3))]


@pytest.mark.parametrize("again", [1, 2, 3])
def test_finished_parts_are_kept_for_any_successor(tmp_path, monkeypatch, again):
    """Two processes are killed in the second of three rounds."""
    lines = _lines(6 * _WINDOW)
    with pytest.raises(_Killed):
        _translate(tmp_path / "parts", lines, 2, monkeypatch, calls=_WINDOW // _BATCH + 3)
    done = _translate(tmp_path / "parts", lines, again, monkeypatch)
    assert done.output == _reversed(lines)
    assert set().union(*done.encoded) == set(lines[2 * _WINDOW :]) - {""}


def test_a_missing_part_is_made_again(tmp_path, monkeypatch):
    lines = _lines(4 * _WINDOW)
    _translate(tmp_path / "parts", lines, 1, monkeypatch)
    (tmp_path / "parts/part_00000002.txt").unlink()
    (tmp_path / "parts/part_00000003.txt.partial").write_text("half")
    done = _translate(tmp_path / "parts", lines, 1, monkeypatch)
    assert done.output == _reversed(lines)
    assert done.encoded == [set(lines[2 * _WINDOW : 3 * _WINDOW]) - {""}]


@pytest.mark.parametrize("other", [{"text": "b"}, {"origin": "trained on"}])
def test_foreign_parts_are_not_used(tmp_path, monkeypatch, other):
    lines = _lines(3 * _WINDOW)
    _translate(tmp_path / "parts", lines[::-1], 1, monkeypatch, **other)
    with pytest.raises(_Killed):
        _translate(tmp_path / "parts", lines, 1, monkeypatch, calls=1)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["belongs_to.txt"]
    done = _translate(tmp_path / "parts", lines[: 2 * _WINDOW], 1, monkeypatch)
    assert done.output == _reversed(lines[: 2 * _WINDOW])


def test_parts_without_a_note_are_not_used(tmp_path, monkeypatch):
    """An interrupted deletion leaves this state."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/part_00000000.txt").write_text("old\n")
    assert _translate(tmp_path / "parts", ["ab"], 1, monkeypatch).output == ["ba"]


def test_a_foreign_folder_is_unchanged(tmp_path):
    translator = Translator(Reverser(_BATCH, (8,)), Letters(), Letters())
    parts = Parts(tmp_path, translator, _best, {})
    (tmp_path / "part_2_of_my_book.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is for parts of the result, and holds part_2_of_my_boo"):
        parts.write(["a"], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["part_2_of_my_book.txt"]


def test_lines_are_read_a_round_at_a_time(tmp_path):
    read, ahead = itertools.count(), []

    class Watched(Reverser):
        def __call__(self, features):
            ahead.append(next(read))
            return super().__call__(features)

    translator = Translator(Watched(_BATCH, (8,)), Letters(), Letters())
    lines = ("ab" for _ in range(20 * _WINDOW) if next(read) >= 0)
    parts = Parts(tmp_path / "parts", translator, _best, {})
    parts.write(lines, 20 * _WINDOW)
    assert ahead[0] == _WINDOW and len(ahead) == 20 * 16


def test_a_part_that_vanished_is_noticed(tmp_path):
    translator = Translator(Reverser(_BATCH, (8,)), Letters(), Letters())
    parts = Parts(tmp_path / "parts", translator, _best, {})
    num_parts = parts.write(["ab"] * (2 * _WINDOW + 1), 2 * _WINDOW + 1)
    (tmp_path / "parts/part_00000001.txt").unlink()
    with pytest.raises(FileNotFoundError, match="part_00000001"):
        list(parts.lines(num_parts))


def test_parts_keep_which_lines_were_cut(tmp_path):
    class Cutting(Reverser):
        """Sources of four letters fill their rows, so that their EOS is forced."""

        def __call__(self, features):
            found = super().__call__(features)
            return {**found, "token_log_probs": found["token_log_probs"] - 1.0}

    translator = Translator(Cutting(_BATCH, (5,)), Letters(), Letters())
    lines = ["abc", "abcd", "", "ab"] * _BATCH * 16
    parts = Parts(tmp_path / "parts", translator, _best, {})
    num_parts = parts.write(lines, len(lines))

    # Another process joins the parts.
    written = list(Parts(tmp_path / "parts", translator, _best, {}).lines(num_parts))
    assert [line.text for line in written] == _reversed(lines)
    wanted = [Finish.LENGTH if len(line) == 4 else Finish.STOP for line in lines]
    assert [line.finish for line in written] == wanted


def test_a_line_without_a_result_has_its_number_in_the_whole_text(tmp_path):
    translator = Translator(Reverser(_BATCH, (8,)), Letters(), Letters())
    lines = ["ab"] * (_WINDOW + 5) + ["a!b"] + ["ab"] * 9
    parts = Parts(tmp_path / "parts", translator, _best, {})
    with pytest.raises(NoResultError, match=f"^line {_WINDOW + 6} has no translation: .* finite"):
        parts.write(lines, len(lines))
    # The parts that were finished before stay.
    assert (tmp_path / "parts/part_00000000.txt").exists()
