"""What a model gains that starts from an imported one, on a language that this one does not know.

    python -m bench.fine_tune --text=m4bible --out=OUT [--languages=de,nb,sv] [--new=da]

--text is a folder of {train,dev,test}/<lang>-en.tsv.gz. M2M-100's small twin, nllb.ToyDense, learns
--languages from and into English, with a vocabulary in NLLB's form that is learned of their text.
It is exported for transformers, and imported again as any published model is. Then --new is
learned, whose text the vocabulary has not seen and which gets a token by `new_languages`: from
scratch, and from the imported run, whose token of the nearest languages is that of the new one at
first. All of these train for equally many steps on the same batches. What is in OUT is not made
again.
"""

import io
import json
import pathlib
from collections.abc import Iterator, Sequence

import langcodes
import sentencepiece
from absl import flags

from bench import multilingual
from data_prep import tsv
from lingvo_gshard import cli
from lingvo_gshard.checkpoints.checkpoints import whole_steps
from lingvo_gshard.files import atomic_file, table
from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.train.summaries import EVAL_METRICS, read_lines

_TEXT = flags.DEFINE_string("text", None, "A folder of pairs with English.", required=True)
_OUT = flags.DEFINE_string("out", None, "The folder of data and runs.", required=True)
_LANGUAGES = flags.DEFINE_list("languages", ["de", "nb", "sv"], "What is learned first.")
_NEW = flags.DEFINE_string("new", "da", "The language that is added.")
_NEAR = flags.DEFINE_list("near", ["nb", "sv"], "The languages that its token begins as.")
_PIECES = flags.DEFINE_integer("pieces", 4000, "Pieces of the vocabulary.", 300)
_STEPS = flags.DEFINE_integer("pretraining_steps", 2000, "Steps of the first run.", 1)
_TUNING_STEPS = flags.DEFINE_integer("steps", 500, "Steps of each run of the new language.", 1)
_SENTENCES = flags.DEFINE_integer("sentences", 200, "Of test, in each direction, to decode.", 1)

_MODEL = "nllb.ToyDense"
_LINES_PER_LANGUAGE = 10_000  # Of text that the vocabulary is learned of.
_MAX_PIECES = 48  # The model's rows of targets; longer pairs are left out.
_BY_PIECE = r'((r"theta\.target_embedding\..*", "BY_PIECE"), (r"theta\..*", "SAME"))'


def main() -> None:
    out = pathlib.Path(_OUT.value)
    imported = _imported(out)
    data = _prepared(
        out / "data", imported / "vocab/source.model", [_NEW.value], [_code(_NEW.value)]
    )

    near = " ".join(map(_code, _NEAR.value))
    warm = (
        f"train.warm_start_from={imported}",
        f"train.warm_start_rules={_BY_PIECE}",
        f'train.warm_start_pieces=(("{_code(_NEW.value)}", "{near}"),)',
    )
    frozen = (*warm, r"train.frozen=theta\..*\.feed_forward\.w[io].*")
    table_alone = (*warm, r"train.frozen=theta\.(encoder|decoder)\..*")
    steps = _TUNING_STEPS.value
    runs = {
        "from scratch": _tuned(out / "scratch", data, (), steps),
        "from the imported run, after 1 step": _tuned(out / "start", data, warm, 1),
        "from the imported run": _tuned(out / "all", data, warm, steps),
        "the same, feed-forwards frozen": _tuned(out / "frozen", data, frozen, steps),
        "the same, all but the table frozen": _tuned(out / "table", data, table_alone, steps),
    }

    codes = [_NEW.value, f"en-{_NEW.value}"]
    header = ["", "steps", *(f"nll of {code}" for code in codes)]
    rows = [[*header, *(f"BLEU of {code}" for code in codes)]]
    for name, logdir in runs.items():
        losses = _losses(logdir)
        scores = _scores(logdir)
        row = [name, str(1 if logdir.name == "start" else steps)]
        row += [f"{losses[code]:.3f}" for code in codes]
        rows.append([*row, *(f"{scores[code]:.1f}" for code in codes)])
    print(table.text(rows))


def _code(language: str) -> str:
    """Returns NLLB's code of a language: deu_Latn for de."""
    tag = langcodes.Language.get(language)
    return f"{tag.to_alpha3()}_{tag.maximize().script}"


# --- the model that is imported ---


def _imported(out: pathlib.Path) -> pathlib.Path:
    """Trains, exports and imports a model; returns the folder of the imported run."""
    tokenizer = out / "tokenizer"
    if not (tokenizer / fairseq_vocabulary.MODEL).exists():
        _write_tokenizer(tokenizer)
    data = _prepared(out / "pretraining_data", tokenizer, _LANGUAGES.value, ())
    trained = _trained(out / "pretrained", data, (), _STEPS.value)

    published = out / "published"
    if not (published / "config.json").exists():
        flagged = (f"--logdir={trained}", "--to=huggingface", f"--out={published}")
        multilingual.command("lingvo_gshard.export_bundle", *flagged)
    imported = out / "imported"
    if not (imported / "checkpoints/0").is_dir():
        flagged = (f"--from={published}", f"--logdir={imported}")
        print(multilingual.command("lingvo_gshard.import_model", *flagged))
    return imported


def _write_tokenizer(folder: pathlib.Path) -> None:
    """Learns a vocabulary, and writes it as NLLB's is published."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_text(),
        model_writer=model,
        vocab_size=_PIECES.value,
        model_type="bpe",
        character_coverage=1.0,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [_code(language) for language in (*_LANGUAGES.value, "en")]
    listed = {"additional_special_tokens": tokens, "tokenizer_class": "NllbTokenizer"}
    atomic_file.write(folder / "tokenizer_config.json", json.dumps(listed))
    atomic_file.write(folder / fairseq_vocabulary.MODEL, model.getvalue())


def _text() -> Iterator[str]:
    """Yields text of both sides, from all over each language's training text."""
    for language in _LANGUAGES.value:
        pairs = list(tsv.read(_source(language, "train")))
        for pair in pairs[:: max(1, len(pairs) // _LINES_PER_LANGUAGE)]:
            if isinstance(pair, tsv.Pair):
                yield from pair.sides


def _source(language: str, split: str) -> pathlib.Path:
    return pathlib.Path(_TEXT.value, split, f"{language}-en.tsv.gz").absolute()


# --- data and runs ---


def _prepared(
    data: pathlib.Path,
    vocabulary: pathlib.Path,
    languages: Sequence[str],
    new_languages: Sequence[str],
) -> pathlib.Path:
    """Prepares both directions of some languages with a vocabulary; returns the folder."""
    lines = [
        f"vocabulary = {json.dumps(str(vocabulary.absolute()))}",
        f"new_languages = {json.dumps(list(new_languages))}",
        'directions = "many_to_many"',
        f"max_pieces = {_MAX_PIECES}",
    ]
    for language in languages:
        for split in ("train", "dev", "test"):
            lines += [
                "[[sources]]",
                'format = "tsv"',
                f"path = {json.dumps(str(_source(language, split)))}",
                f'language = "{language}"',
                f'split = "{split}"',
            ]
    settings = data.with_suffix(".toml")
    atomic_file.write(settings, "\n".join(lines) + "\n")
    multilingual.command("data_prep.build", f"--config={settings}", f"--out={data}")
    return data


def _trained(
    logdir: pathlib.Path, data: pathlib.Path, settings: Sequence[str], steps: int
) -> pathlib.Path:
    """Trains the model for some steps unless it is trained; returns the run's folder."""
    if max(whole_steps(logdir), default=0) < steps:
        all_settings = [
            *settings,
            f"train.max_steps={steps}",
            f"train.save_checkpoints_steps={steps}",
            f"train.iterations_per_loop={min(steps, 20)}",
        ]
        given = [f"--set={setting}" for setting in all_settings]
        flagged = (f"--model={_MODEL}", f"--data_dir={data}", f"--logdir={logdir}", *given)
        multilingual.trainer("train", *flagged)
    return logdir


def _tuned(
    logdir: pathlib.Path, data: pathlib.Path, settings: Sequence[str], steps: int
) -> pathlib.Path:
    """Trains as `_trained`, evaluates on dev and decodes test."""
    _trained(logdir, data, settings, steps)
    if not (logdir / EVAL_METRICS).exists():
        multilingual.trainer("eval", f"--logdir={logdir}")
    if not (logdir / "decode_test/scores.json").exists():
        most = f"--set=decode.max_sentences={_SENTENCES.value}"
        multilingual.trainer("decode", f"--logdir={logdir}", most)
    return logdir


def _losses(logdir: pathlib.Path) -> dict[str, float]:
    """Returns the loss of each direction on dev."""
    return {
        line["name"].removeprefix("dev_"): line["nll"] for line in read_lines(logdir / EVAL_METRICS)
    }


def _scores(logdir: pathlib.Path) -> dict[str, float]:
    """Returns the BLEU of each direction on the sentences of test."""
    scores = json.loads((logdir / "decode_test/scores.json").read_text())
    return {language["code"]: language["bleu"]["value"] for language in scores["languages"]}


if __name__ == "__main__":
    cli.run("fine_tune", main)
