"""Programs on demand: each is compiled once, and only training programs are loaded."""

import threading

import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train import programs
from lingvo_gshard.train.programs import Programs

_BATCH = NestedMap(x=TensorSpec((4, 8), "int32", "BL"))


def _programs(saved=None):
    """Programs that are texts, and a list of the modes and numbers of steps that were traced."""
    made = Programs(None, saved, in_process=True)
    asked = []

    def trace(recipe):
        mode, _, num_steps = recipe.arguments
        asked.append((mode, num_steps))
        return f"{mode.name}_{num_steps}"

    made._trace = trace
    return made, asked


class _Saved:
    def load_or_compile(self, program):
        return f"loaded {program}"


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(programs, "compile_program", lambda program: f"compiled {program}")


def test_a_program_is_made_once_for_each_mode_shape_and_number_of_steps():
    made, asked = _programs()
    shorter = NestedMap(x=TensorSpec((4, 4), "int32", "BL"))
    for _ in range(2):
        assert made.get(Mode.TRAIN, _BATCH, 2) == "compiled TRAIN_2"
        assert made.get(Mode.TRAIN, _BATCH) == "compiled TRAIN_1"
        assert made.get(Mode.TRAIN, shorter) == "compiled TRAIN_1"
        assert made.get(Mode.EVAL, _BATCH) == "compiled EVAL_1"
    assert asked == [(Mode.TRAIN, 2), (Mode.TRAIN, 1), (Mode.TRAIN, 1), (Mode.EVAL, 1)]


def test_two_threads_that_ask_at_once_get_the_same_one():
    made, asked = _programs()
    together = threading.Barrier(2)
    got = []

    def ask():
        together.wait()
        got.append(made.get(Mode.TRAIN, _BATCH))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["compiled TRAIN_1"] * 2 and len(asked) == 1


def test_only_programs_that_train_are_loaded():
    made, _ = _programs(_Saved())
    assert made.get(Mode.TRAIN, _BATCH) == "loaded TRAIN_1"
    assert made.get(Mode.EVAL, _BATCH) == "compiled EVAL_1"
    assert made.get(Mode.PREDICT, _BATCH) == "compiled PREDICT_1"
