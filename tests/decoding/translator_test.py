"""Translating lines: their order, blank and long lines, n-best lists, and splitting."""

import dataclasses
import itertools
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard.decoding.outcomes import NoResultError
from lingvo_gshard.decoding.text_decoder import Hypothesis, Token
from lingvo_gshard.decoding.translator import Translator, split
from lingvo_gshard.spmd import processes
from tests.decoding import vocabularies
from tests.decoding.reverser import Letters, Reverser


def _translator(batch_size=3, input_lengths=(16, 20)):
    decoder = Reverser(batch_size, input_lengths)
    return Translator(decoder, Letters(), Letters()), decoder


def _texts(lines, *sizes):
    return [best.text for best, *_ in _translator(*sizes)[0].decode(lines)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_each_line_gets_its_translation_in_order(batch_size):
    lines = ["abc", "z", "abcdefghijklmnopqr", "hello", "b", "qq", "yes"] * 20
    assert _texts(lines, batch_size) == [line[::-1] for line in lines]


def test_a_part_knows_the_shortest_rows_that_hold_it():
    translator, _ = _translator(3, (4, 16, 20))
    long = "abcdefghijklmnopqrstuvwx"
    for line, want in {"abc": [(4, 4)], "abcd": [(5, 16)], " ": [], long: [(13, 16)] * 2}.items():
        parts = translator.parts(line)
        assert [(len(part.ids), part.row_length) for part in parts] == want
        assert "".join(Letters().decode(part.ids) for part in parts) == line.strip()


def _without_tokens(nbest):
    return tuple(dataclasses.replace(hypothesis, tokens=()) for hypothesis in nbest)


class _Unsure(Reverser):
    """The log-probability of the i-th token is -i."""

    def __call__(self, features):
        found = super().__call__(features)
        log_probs = np.zeros(found["ids"].shape, np.float32) - np.arange(found["ids"].shape[-1])
        return {**found, "token_log_probs": log_probs}


def test_tokens_have_scores_over_all_parts_of_a_line():
    translator = Translator(_Unsure(3, (5,)), Letters(), Letters())
    long, short = translator.decode(["abcdefg", "ab"])
    assert short[0].tokens == (Token(5, "b", 0.0), Token(4, "a", -1.0), Token(2, "$", -2.0))
    assert "".join(token.piece for token in long[0].tokens) == "cba$gfed$"
    assert [token.log_prob for token in long[0].tokens] == [-0.0, -1, -2, -3, -0.0, -1, -2, -3, -4]
    assert len(long[0].tokens) == long[0].num_tokens


def test_lines_are_counted_as_their_last_parts_are_done():
    translator, _ = _translator(3, (5, 9))
    counts = []
    lines = ["", "abcdefghijklmnop", "ab", "abcdefg", "a"]
    list(translator.decode(lines, on_lines=counts.append))
    assert sum(counts) == len(lines) and counts[0] == 1 and max(counts) < len(lines)


class _Repeating(Reverser):
    """The second-best result equals the best; in the third, the last letters do."""

    def __call__(self, features):
        found = super().__call__(features)
        found["ids"][:, 2] = found["ids"][:, 1]
        found["ids"][:, 1] = found["ids"][:, 0]
        found["lengths"][:, 2] = found["lengths"][:, 1]
        return {**found, "scores": found["lengths"] * [-0.25, -0.5, -2.0]}


def test_no_text_is_in_an_n_best_list_twice():
    """Neither for a line, nor for a line in two parts."""
    translator = Translator(_Repeating(2, (16, 20)), Letters(), Letters())
    for found in translator.decode(["abc", "abcdefghijklmnopqrstuvwx", "aa"]):
        texts = [hypothesis.text for hypothesis in found]
        assert len(set(texts)) == len(texts)
    (found,) = translator.decode(["abc"])
    assert _without_tokens(found) == (Hypothesis("cba", -1.0, 4), Hypothesis("aaa", -8.0, 4))
    (found,) = translator.decode(["aa"])  # All three hypotheses are equal.
    assert [hypothesis.text for hypothesis in found] == ["aa"]


def test_a_text_that_is_drawn_twice_is_two_samples():
    decoder = _Repeating(2, (16, 20))
    decoder.spec = dataclasses.replace(decoder.spec, is_sampled=True)
    (found,) = Translator(decoder, Letters(), Letters()).decode(["abc"])
    assert [hypothesis.text for hypothesis in found] == ["cba", "cba", "aaa"]


def test_blank_lines_stay_blank():
    assert _texts(["", "ab", "  \t", "cd", "\u2028\u200b", ""]) == ["", "ba", "", "dc", "", ""]


def test_lines_are_normalized_as_training_text_is():
    lines = ["\ufeffa\tb", "so\u00adft", "ﬁne", "<2de>\u00a0x", "e\u0301"]
    assert _texts(lines) == ["b a", "tfos", "enif", "x >ed2<", "é"]
    assert _translator()[0].num_tokens(lines) == [4, 5, 5, 8, 2]


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_blank_lines_do_not_reach_the_decoder(lines):
    translator, decoder = _translator()
    assert list(translator.decode(lines)) == [(Hypothesis("", 0.0, 0),)] * len(lines)
    assert not decoder.shapes


def test_a_long_line_is_translated_in_parts():
    translator, decoder = _translator(3, (5,))
    found = list(translator.decode(["abcdefg", "ab"]))
    # Parts of 3 and 4 letters, each followed by EOS.
    assert _without_tokens(found[0]) == (
        Hypothesis("cba gfed", (4 * -1.0 + 5 * -1.25) / 9, 9),
        Hypothesis("aaa aaaa", (4 * -8.0 + 5 * -10.0) / 9, 9),
    )
    assert found[1][0].text == "ba" and {shape[0] for shape in decoder.shapes} == {3}


def test_a_character_that_is_too_long_is_truncated_with_a_warning_and_keeps_eos(caplog):
    class Bytes(Letters):
        def encode(self, text):
            return [7, 8, 9, 10, 2]

    translator = Translator(Reverser(3, (2, 4)), Bytes(), Letters())
    assert [part.ids.tolist() for part in translator.parts("a")] == [[7, 8, 9, 2]]
    assert "Truncated 'a' from 5 to 4 pieces." in caplog.text


def test_each_part_of_a_line_begins_with_its_target():
    class Marked(Letters):
        def encode(self, text):
            assert text.startswith(("<2de> ", "<2fr> "))
            return super().encode(text[2] + text[6:])

    decoder = Reverser(3, (16, 20))
    decoder.spec = dataclasses.replace(decoder.spec, targets=("de", "fr"))
    lines = ["<2de> bc", "<2fr> ", "", f"<2fr> {'k' * 25}"]
    found = Translator(decoder, Marked(), Letters()).decode(lines)
    halves = "k" * 13 + "f", "k" * 12 + "f"
    assert [best.text for best, *_ in found] == ["cbd", "", "", " ".join(sorted(halves))]


def test_every_part_has_a_row_of_the_shortest_length_that_holds_it():
    translator, _ = _translator(5, (4, 8, 16))
    parts = [part for n in (9, 3, 4, 1, 15, 7, 3, 8, 2) for part in translator.parts("a" * n)]
    rows = {}
    for indices, features in translator._batches(parts):
        ids = features.source_ids
        assert ids.shape[0] == 5 and {array.dtype.name for array in features.values()} == {"int32"}
        assert not any(array[len(indices) :].any() for array in features.values())
        for row, index in enumerate(indices):
            size = int(features.source_segment_ids[row].sum())
            assert {4: 0, 8: 4, 16: 8}[ids.shape[1]] < size <= ids.shape[1] and index not in rows
            rows[index] = ids[row, :size].tolist()
            assert features.source_positions[row, :size].tolist() == list(range(size))
            assert not ids[row, size:].any()
    assert rows == {index: part.ids.tolist() for index, part in enumerate(parts)}


def test_processes_have_equally_many_batches_of_each_length(monkeypatch):
    monkeypatch.setattr(processes, "largest", lambda own: [3, own[1] + 1])
    translator, _ = _translator(2, (4, 8))
    parts = [part for line in ("ab", "a", "b") for part in translator.parts(line)]
    found = [(rows, features.source_ids.shape) for rows, features in translator._batches(parts)]
    assert found == [([1, 2], (2, 4)), ([0], (2, 4)), ([], (2, 4)), ([], (2, 8))]


def test_translations_are_returned_before_all_lines_are_read():
    translator, _ = _translator(batch_size=1)
    endless = translator.decode(itertools.cycle(["ab", "cde"]))
    assert [next(endless)[0].text for _ in range(40)] == ["ba", "edc"] * 20


def test_a_line_without_a_result_is_an_error_that_names_it():
    """The lines before it still get results. In a long line, one such part is enough."""
    translator, _ = _translator()
    found = translator.decode(["ab", "", "c!d", "e"], first_number=40)
    assert [next(found)[0].text, next(found)[0].text] == ["ba", ""]
    message = r"^line 42 has no translation: the model's numbers for it are not finite \(NaN or"
    with pytest.raises(NoResultError, match=message):
        next(found)

    long = "abcdefghijklmnopqrstuvwxyz" + "!"
    assert len(translator.parts(long)) == 2
    with pytest.raises(NoResultError, match="^line 2 has no translation"):
        translator.decode_together(["ab", long])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_hypothesis_without_a_finite_score_is_dropped(bad):
    class Scored(Reverser):
        def __call__(self, features):
            found = super().__call__(features)
            is_short = found["lengths"][:, :1] < 4
            scores = np.where(is_short, [bad, -1.0, bad], [bad, bad, bad])
            return {**found, "scores": scores}

    translator = Translator(Scored(3, (16,)), Letters(), Letters())
    ((only,),) = translator.decode(["bc"])
    assert _without_tokens([only]) == (Hypothesis("aa", -1.0, 3),)
    with pytest.raises(NoResultError, match="^line 2 "):
        list(translator.decode(["bc", "bcd"]))


def test_a_translation_is_cut_if_the_model_did_not_end_it():
    """It has the maximum length, and no EOS, or an EOS that is less likely than not."""

    class Longest(Reverser):
        """Rows of 5 tokens; the EOS of a source with `b` is unlikely, and missing with `c`."""

        def __call__(self, features):
            found = super().__call__(features)
            for row, source in enumerate(features.source_ids.tolist()):
                if 5 in source:
                    found["token_log_probs"][row, :, -1] = -0.7
                if 6 in source:
                    found["ids"][row, :, -1] = 7
            return found

    class Lax(Letters):
        def decode(self, ids):
            return super().decode([*ids, 2])

    translator = Translator(Longest(3, (5,)), Letters(), Lax())
    lines = ["aaaa", "aaab", "aab", "aaac", "aac", "", "a" * 5 + "b" * 3]
    finishes = [best.finish.value for best, *_ in translator.decode(lines)]
    assert finishes == ["stop", "length", "stop", "length", "stop", "stop", "length"]


def test_line_breaks_and_tabs_in_a_translation_become_spaces():
    class Breaking(Letters):
        def decode(self, ids):
            text = super().decode(ids).replace("x", "\n").replace("y", "\r\n")
            return text.replace("z", "\u2028").replace("w", "\t")

    translator = Translator(_translator()[1], Letters(), Breaking())
    assert [best.text for best, *_ in translator.decode(["dxcybzawa"])] == ["a a b c d"]


def test_a_translation_has_no_control_characters():
    """Byte pieces can spell any character; see normalization.CONTROL."""

    class Bytes(Letters):
        def decode(self, ids):
            text = super().decode(ids).replace("x", "\x00").replace("y", "\x1b[31m")
            return text.replace("z", "\u202e").replace("w", "\x85")

    translator = Translator(_translator()[1], Letters(), Bytes())
    found = [best.text for best, *_ in translator.decode(["dxcybzawa", "x", "axb"])]
    assert found == ["a ab[31mcd", "", "ba"]


def test_the_parts_of_a_line_are_joined_as_their_script_is_written():
    class Chinese(Letters):
        def decode(self, ids):
            return super().decode(ids).translate(str.maketrans("abcdefg", "一二三四五六七"))

    (found,) = Translator(Reverser(3, (5,)), Letters(), Chinese()).decode(["abcdefg"])
    assert [hypothesis.text for hypothesis in found] == ["三二一七六五四", "一一一一一一一"]


# --- splitting ---


def _at_most_words(most):
    return lambda text: len(text.split()) <= most


def test_text_that_fits_is_one_part():
    assert split("  one two three ", _at_most_words(3)) == ["one two three"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("One two. Three four five. Six", ["One two.", "Three four five.", "Six"]),
        ("one two three, four five six", ["one two three,", "four five six"]),
        ("one two three four", ["one two", "three four"]),
        ('He said "stop!" and they all went', ['He said "stop!"', "and they all went"]),
        ("it costs 3.500 or less", ["it costs", "3.500 or less"]),
        ("look at www.example.com today", ["look at", "www.example.com today"]),
        ("we met at 12:30 sharp", ["we met at", "12:30 sharp"]),
    ],
)
def test_long_text_is_cut_at_the_best_place_near_the_middle(text, want):
    assert split(text, _at_most_words(4 if "said" in text else 3)) == want


def test_marks_need_no_space_in_scripts_without_them():
    text = "我们去公园,他们在家里等我们回来"  # In its normalized form: the comma was a wide one.
    assert split(text, lambda part: len(part) <= 12) == ["我们去公园,", "他们在家里等我们回来"]


def test_scripts_without_spaces_are_cut_after_sentences():
    text = "我们去公园。他们在家里等我们回来。天气很好"
    assert split(text, lambda part: len(part) <= 12) == [
        "我们去公园。",
        "他们在家里等我们回来。",
        "天气很好",
    ]


def test_a_long_word_is_cut():
    assert split("abcdefgh", lambda part: len(part) <= 3) == ["ab", "cd", "ef", "gh"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="ab.!? ,。\u3000é", min_size=1, max_size=80), st.integers(0, 9))
def test_every_part_fits_and_only_space_is_lost(text, most):
    def fits(part):
        return len(part) <= most

    parts = split(text, fits)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(fits(part) or len(part) <= 1 for part in parts)


class _Tongues(Letters):
    """A vocabulary with tokens of three languages."""

    languages: typing.ClassVar = {"deu_Latn": 41, "eng_Latn": 42, "fra_Latn": 43}

    def decode(self, ids):
        return super().decode([token for token in ids if token not in self.languages.values()])


class _Forced(Reverser):
    """Begins each translation with its row's forced token, and records these tokens."""

    def __call__(self, features):
        results = super().__call__(features)
        self.first_ids.append(features.first_ids.tolist())
        for row, first_id in enumerate(features.first_ids):
            if results["lengths"][row, 0]:
                results["ids"][row, 0] = [first_id, *results["ids"][row, 0, 1:]]
        return results


def _of_languages(batch_size, lengths):
    decoder = _Forced(batch_size, lengths)
    codes = tuple(_Tongues.languages)
    decoder.first_ids = []
    decoder.spec = dataclasses.replace(decoder.spec, sources=codes, targets=codes)
    return Translator(decoder, _Tongues(), _Tongues()), decoder


def test_a_source_begins_with_its_language_and_its_translation_with_another():
    translator, decoder = _of_languages(4, (8,))
    lines = ["deu_Latn fra_Latn bc", "fra_Latn eng_Latn d", "eng_Latn deu_Latn  "]
    first, second, blank = (translator.parts(line) for line in lines)
    assert first[0].ids.tolist() == [41, 5, 6, 2] and first[0].first_id == 43
    assert second[0].ids.tolist() == [43, 7, 2] and second[0].first_id == 42
    assert blank == []
    assert translator.num_tokens(lines) == [4, 3, 2]

    # One batch of several languages; the shortest source comes first, and two rows are empty. The
    # forced token replaces the first letter of a reversed source, and is not part of the text.
    best = [line[0].text for line in translator.decode(lines)]
    assert decoder.first_ids == [[42, 43, -1, -1]]
    assert best == ["b", "", ""]


def test_each_part_of_a_long_line_has_the_languages():
    translator, _ = _of_languages(3, (4,))
    parts = translator.parts("deu_Latn eng_Latn bb cc")
    assert [part.ids.tolist() for part in parts] == [[41, 5, 5, 2], [41, 6, 6, 2]]
    assert {part.first_id for part in parts} == {42}


def test_languages_that_are_not_the_models_are_refused():
    translator, _ = _of_languages(3, (4,))
    spec = translator.spec
    assert spec.beginning("fra_Latn", "deu_Latn") == "deu_Latn fra_Latn "
    assert spec.source_languages == ("deu_Latn", "eng_Latn", "fra_Latn")
    for target, source, message in (
        ("fra_Latn", None, "source_lang is missing: expected one of deu_Latn, eng_Latn, fra_Latn"),
        (None, "deu_Latn", "target_lang is missing: expected one of deu_Latn"),
        ("fra_Latin", "deu_Latn", r"target_lang fra_Latin: .* Did you mean fra_Latn\?"),
    ):
        with pytest.raises(ValueError, match=message):
            spec.beginning(target, source)
    with pytest.raises(ValueError, match="source_lang bb: expected one of"):
        translator.parts("bb cc")

    many = tuple(f"aa{chr(97 + i)}_Latn" for i in range(26))
    spec = dataclasses.replace(spec, sources=many)
    with pytest.raises(ValueError, match="aat_Latn and 6 more$"):
        spec.beginning("fra_Latn", "12")


def test_a_text_that_names_another_target_keeps_its_own(tmp_path):
    tokenizer = vocabularies.train(tmp_path / "x.model", symbols=("<2de>", "<2fr>"))
    decoder = Reverser(2, (64,))
    decoder.spec = dataclasses.replace(decoder.spec, targets=tokenizer.targets)
    translator = Translator(decoder, tokenizer, tokenizer)
    for text in ("<2fr> ba", "ke <2fr> <2de> li", "<2de>"):
        # The line that a program, or the server, makes from it.
        (part,) = translator.parts(decoder.spec.beginning("de") + text)
        assert tokenizer.pieces(part.ids)[0] == "<2de>"
        assert not {"<2de>", "<2fr>"} & set(tokenizer.pieces(part.ids)[1:])
        assert tokenizer.decode(part.ids) == f"<2de> {text}"
