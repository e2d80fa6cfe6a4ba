"""Prompts and their continuations, by a toy decoder that appends the same tokens to each."""

import re

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import kinds, reading
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.generator import Generator
from lingvo_gshard.input.example_codec import BOS_ID
from lingvo_gshard.spmd.specs import WHOLE
from tests.decoding import vocabularies

_LONGEST = 8


class _Appender:
    """Appends `ids` to each prompt; with samples, the scores are computed from the seeds."""

    share = WHOLE

    def __init__(self, ids, num_best=1, is_sampled=False):
        self.ids, self.batches = np.array(ids), []
        self.spec = DecoderSpec(
            "toy.LmDense4L",
            ("web",),
            2,
            (4, _LONGEST),
            num_best,
            1,
            kind="text",
            is_sampled=is_sampled,
        )

    def __call__(self, features):
        self.batches.append(NestedMap(features))
        is_used = features.segment_ids[:, :1] > 0
        scores = features.seeds[:, 1:] / 2**31
        return {
            "ids": np.tile(self.ids, (2, 1, 1)),
            "lengths": len(self.ids) * is_used,
            "scores": scores if self.spec.is_sampled else scores * 0 - 1.0,
            "token_log_probs": np.zeros((2, 1, len(self.ids))),
        }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return vocabularies.train(tmp_path_factory.mktemp("vocabulary") / "text.model")


def _generator(tokenizer, ids, **settings):
    decoder = _Appender(ids, **settings)
    generator = kinds.text_decoder(decoder, tokenizer, tokenizer)
    assert isinstance(generator, Generator)
    return generator, decoder


def test_a_prompt_is_encoded_like_the_beginning_of_a_document(tokenizer):
    generator, decoder = _generator(tokenizer, tokenizer.encode("mo"))
    (found,), (blank,) = generator.decode(["ba \u3000ke", ""])
    assert found.text == " mo" and found.num_tokens == len(tokenizer.encode("mo"))
    assert blank.text == "mo"  # A document does not begin with a space.

    (batch,) = decoder.batches
    prompt = [BOS_ID, *tokenizer.encode("ba ke")[:-1]]
    assert batch.ids.tolist() == [[BOS_ID, 0, 0, 0], prompt + [0] * (4 - len(prompt))]
    assert batch.positions[1].tolist() == [*range(len(prompt)), *[0] * (4 - len(prompt))]


def test_a_continuation_may_continue_a_word_or_a_character(tokenizer):
    """Bytes spell text without pieces: the prompt's tokens end with half of a character."""
    whole = tokenizer.encode("ba \u00e9")[:-1]
    first, second = whole[-2:]
    generator, _ = _generator(tokenizer, [second, *tokenizer.encode("x\n\ty ")])
    source = np.array([BOS_ID, *whole[:-2], first])
    (found,) = generator._hypotheses(
        source,
        {
            "ids": generator.decoder.ids[None],
            "lengths": np.array([len(generator.decoder.ids)]),
            "scores": np.zeros(1),
            "token_log_probs": np.zeros((1, len(generator.decoder.ids))),
        },
    )
    assert found.text == "\u00e9 x y"


def test_a_continuation_has_no_control_characters(tokenizer):
    """Neither NUL and ESC, which byte pieces can spell, nor marks of direction; joiners stay."""
    spelled = [
        token
        for character in "\x00\x1b[1m\u202e\u200d"
        for token in _byte_pieces(tokenizer, character.encode())
    ]
    generator, _ = _generator(tokenizer, [*spelled, *tokenizer.encode("mo")])
    ((found,),) = generator.decode(["ba"])
    assert found.text == "[1m\u200d mo"


def _byte_pieces(tokenizer, data):
    names = tokenizer.pieces(range(tokenizer.vocab_size))
    return [names.index(f"<0x{byte:02X}>") for byte in data]


@pytest.mark.parametrize("first_number", [1, 41])
def test_a_prompt_that_is_too_long_is_refused_by_its_number(tokenizer, first_number):
    generator, decoder = _generator(tokenizer, [2])
    long = "ba ke li mo " * 9
    num_tokens = len(tokenizer.encode(long))
    message = (
        f"prompt {first_number + 1} has {num_tokens} tokens with BOS, and the limit is 8: "
        "shorten it, or raise decode.max_prompt_len, by --max_prompt_len with --logdir."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        list(generator.decode(["ba", long], first_number))
    assert not decoder.batches


def test_samples_of_a_prompt_have_separate_seeds_in_any_batch(tokenizer):
    generator, decoder = _generator(tokenizer, tokenizer.encode("mo"), num_best=3, is_sampled=True)
    assert [part.seed for part in generator.parts("ba", 4, 7)] == [(7, 9), (7, 10), (7, 11)]
    found = list(generator.decode(["ba", "ke", "ba"], first_number=4, seed=7))
    for nbest in found:
        scores = [hypothesis.score for hypothesis in nbest]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)

    # The last batch has a row without a prompt.
    drawn = {tuple(row) for batch in decoder.batches for row in batch.seeds.tolist()}
    assert len(drawn - {(0, 0)}) == 9

    assert list(generator.decode(["ke"], first_number=5, seed=7)) == [found[1]]
    (other,) = generator.decode(["ke"], first_number=5, seed=8)
    assert not {hypothesis.score for hypothesis in other} & {each.score for each in found[1]}


def test_the_first_tokens_of_a_document_are_its_prompt(tokenizer):
    decoder = _Appender(tokenizer.encode("mo"))
    generator = Generator(decoder, tokenizer, tokenizer, first_tokens=3)
    document = "ba  ke li mo ba"
    ids = [BOS_ID, *tokenizer.encode("ba ke li mo ba")]
    (part,) = generator.parts(document)
    assert part.ids.tolist() == ids[:3] and part.row_length == 4

    prompt, rest = generator.divided(document)
    assert prompt == tokenizer.decode(ids[:3]) and rest.startswith(" ")
    assert prompt + rest == "ba ke li mo ba"
    assert generator.divided("ba") == ("ba", "")


def test_each_program_names_the_other_for_a_model_of_its_own():
    with pytest.raises(ValueError, match=r"toy.X continues prompts: use gshard generate"):
        reading.check_command("toy.X", "text", "translate")
    with pytest.raises(ValueError, match=r"toy.X translates lines: use gshard translate"):
        reading.check_command("toy.X", "parallel", "generate")
    reading.check_command("toy.X", "text", "generate")
