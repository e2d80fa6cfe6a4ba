"""Small vocabularies for tests."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence

import sentencepiece

from lingvo_gshard.input.tokenizer import Tokenizer

SENTENCES = ("ba ke li mo", "ke li mo ba", "a line of words, in parts")


def train(
    path: pathlib.Path, sentences: Sequence[str] = SENTENCES, symbols: Sequence[str] = ()
) -> Tokenizer:
    """Trains a SentencePiece model with this project's special ids, a few words and all bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences] * 9),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=list(symbols),
        add_dummy_prefix=not symbols,  # The same as in data_prep for vocabularies with targets.
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return Tokenizer(path)
