"""Examples and tokens that data_prep prepares in a second of CPU time, beside plain tf.data.

    python -m bench.data_prep

Both read the same gzip files, normalize, drop pairs by length, tokenize with the same two
vocabularies and write records. Only data_prep repairs text, checks scripts and repetition, and
finds duplicates. The time to train the vocabularies is not counted.
"""

import pathlib
import tempfile
import time

import tensorflow as tf
import tensorflow_text
from absl import logging

from bench import corpus
from data_prep import config, engines, pipeline, tsv_folder
from data_prep.pipeline import Step
from lingvo_gshard import cli
from xla_spmd.files import table

_CONFIG = config.BuildConfig(source_vocab_size=8000, target_vocab_size=4000)
_BATCH_LINES = 2048


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder, "text")
        data = pathlib.Path(folder, "data")
        corpus.write(text)
        step_secs = _step_secs(text, data)
        num_examples, num_tokens, plain_secs = _run_tf_data(text, data)

    own_secs = sum(secs for step, secs in step_secs.items() if step is not Step.VOCAB)
    print(f"{num_examples} pairs, {num_tokens} tokens of both sides; CPU seconds of one core")
    by_step = ", ".join(f"{step} {secs:.1f}" for step, secs in step_secs.items())
    print(f"data_prep by step: {by_step}")

    rows = [
        (name, f"{secs:.1f}", f"{num_examples / secs:.0f}", f"{num_tokens / secs:.0f}")
        for name, secs in (("data_prep", own_secs), ("tf.data", plain_secs))
    ]
    print(table.text([("", "CPU s", "examples/s", "tokens/s"), *rows]))


def _step_secs(text: pathlib.Path, data: pathlib.Path) -> dict[Step, float]:
    """Prepares the corpus in this process; returns the CPU seconds of each step."""
    found = tsv_folder.sources_in(text)
    secs = {}
    for step in Step:
        began = time.process_time()
        pipeline.run_through(step, found, data, _CONFIG, engines.pool(1))
        secs[step] = time.process_time() - began
    return secs


def _run_tf_data(text: pathlib.Path, data: pathlib.Path) -> tuple[int, int, float]:
    """Prepares the corpus with tf.data; returns the number of examples, of tokens, CPU seconds."""
    tokenizers = [_tokenizer(data / "vocab" / f"{side}.model") for side in ("source", "target")]

    def serialize(*sides):
        ids = [tokenizer.tokenize(side) for tokenizer, side in zip(tokenizers, sides, strict=True)]
        lines = [
            tf.strings.reduce_join(tf.strings.as_string(side), axis=-1, separator=" ")
            for side in ids
        ]
        num_tokens = sum(tf.size(side.flat_values) for side in ids)
        return tf.strings.join(lines, "\t"), num_tokens

    began = time.process_time()
    num_examples = 0
    num_tokens = 0
    for path in sorted((text / "train").iterdir()):
        lines = tf.data.TextLineDataset(str(path), compression_type="GZIP").batch(_BATCH_LINES)
        pairs = lines.map(_split, tf.data.AUTOTUNE).unbatch().filter(_has_usable_lengths)
        records = pairs.batch(_BATCH_LINES).map(serialize, tf.data.AUTOTUNE).prefetch(1)
        with tf.io.TFRecordWriter(str(data / f"{path.name}.tfrecord")) as writer:
            for serialized, number in records.as_numpy_iterator():
                for record in serialized:
                    writer.write(record)
                num_examples += len(serialized)
                num_tokens += int(number)
    return num_examples, num_tokens, time.process_time() - began


def _tokenizer(path: pathlib.Path) -> tensorflow_text.SentencepieceTokenizer:
    return tensorflow_text.SentencepieceTokenizer(model=path.read_bytes(), add_eos=True)


def _split(lines):
    sides = tf.strings.split(lines, "\t").to_tensor()
    return tuple(tensorflow_text.normalize_utf8(sides[:, i], "NFKC") for i in (0, 1))


def _has_usable_lengths(source, english):
    lengths = [tf.strings.length(side, "UTF8_CHAR") + 10 for side in (source, english)]
    longest = tf.maximum(*lengths)
    shortest = tf.minimum(*lengths)
    return (longest <= _CONFIG.max_chars) & (
        tf.cast(longest, tf.float32) <= _CONFIG.max_length_ratio * tf.cast(shortest, tf.float32)
    )


if __name__ == "__main__":
    cli.run("data_prep", main)
