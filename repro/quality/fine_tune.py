"""The gain from starting with an imported model, for a language that this model does not know.

    python -m repro.quality.fine_tune --text=m4bible --out=OUT [--languages=de,nb,sv] [--new=da]

--text is a folder of {train,dev,test}/<lang>-en.tsv.gz. A small model of M2M-100's form,
nllb.ToyDense, learns --languages from and into English, with a vocabulary of NLLB's form that is
trained on their text. It is exported for transformers, and imported like any published model. Then
a model learns --new, whose text the vocabulary has not seen and whose token is added by
`new_languages`: once from scratch, and once from the imported run, where the new token starts as
the mean of the nearest languages' tokens. All runs train for the same number of steps on the same
batches. Existing results in OUT are kept.
"""

import io
import json
import pathlib
from collections.abc import Iterator, Sequence

import langcodes
import sentencepiece
from absl import flags

from data_prep import tsv
from lingvo_gshard import cli
from lingvo_gshard.checkpoints.saved_steps import whole_steps
from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines
from repro.quality import multilingual
from xla_spmd.files import atomic_file, table

_TEXT = flags.DEFINE_string("text", None, "A folder of pairs with English.", required=True)
_OUT = flags.DEFINE_string("out", None, "The folder of data and runs.", required=True)
_LANGUAGES = flags.DEFINE_list("languages", ["de", "nb", "sv"], "The languages learned first.")
_NEW = flags.DEFINE_string("new", "da", "The language that is added.")
_NEAR = flags.DEFINE_list("near", ["nb", "sv"], "The languages from which its token starts.")
_PIECES = flags.DEFINE_integer("pieces", 4000, "The pieces of the vocabulary.", 300)
_STEPS = flags.DEFINE_integer("pretraining_steps", 2000, "The steps of the first run.", 1)
_TUNING_STEPS = flags.DEFINE_integer("steps", 500, "The steps of each run of the new language.", 1)
_SENTENCES = flags.DEFINE_integer("sentences", 200, "The test sentences of each direction.", 1)

_MODEL = "nllb.ToyDense"
_LINES_PER_LANGUAGE = 10_000  # The lines of text on which the vocabulary is trained.
_MAX_PIECES = 48  # The length of the model's target rows; longer pairs are left out.
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
        "from the imported run, after 1 step": _evaluated(out / "start", data, warm, 1),
        "from the imported run": _evaluated(out / "all", data, warm, steps),
        "from scratch": _evaluated(out / "scratch", data, (), steps),
        "from the imported run, feed-forwards frozen": _evaluated(
            out / "frozen", data, frozen, steps
        ),
        "from the imported run, all but the table frozen": _evaluated(
            out / "table", data, table_alone, steps
        ),
    }
    for logdir in runs.values():
        if not (logdir / "decode_test/scores.json").exists():
            most = f"--set=decode.max_sentences={_SENTENCES.value}"
            multilingual.trainer("decode", f"--logdir={logdir}", most)

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


# --- The imported model ---


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
        sources = (f"--from={published}", f"--logdir={imported}")
        print(multilingual.command("lingvo_gshard.import_model", *sources))
    return imported


def _write_tokenizer(folder: pathlib.Path) -> None:
    """Trains a vocabulary, and writes it in the files in which NLLB's is published."""
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
    """Yields text of both sides, spread over each language's training text."""
    for language in _LANGUAGES.value:
        pairs = list(tsv.read(_source(language, "train")))
        for pair in pairs[:: max(1, len(pairs) // _LINES_PER_LANGUAGE)]:
            if isinstance(pair, tsv.Pair):
                yield from pair.sides


def _source(language: str, split: str) -> pathlib.Path:
    return pathlib.Path(_TEXT.value, split, f"{language}-en.tsv.gz").absolute()


# --- Data and runs ---


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
    """Trains the model for some steps, unless it has done them; returns the run's folder."""
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


def _evaluated(
    logdir: pathlib.Path, data: pathlib.Path, settings: Sequence[str], steps: int
) -> pathlib.Path:
    """Trains the model like `_trained`, and evaluates it on dev; returns the run's folder."""
    _trained(logdir, data, settings, steps)
    if not (logdir / EVAL_METRICS).exists():
        multilingual.trainer("eval", f"--logdir={logdir}")
    return logdir


def _losses(logdir: pathlib.Path) -> dict[str, float]:
    """Returns the loss of each direction on dev."""
    return {
        line["name"].removeprefix("dev_"): line["nll"] for line in read_lines(logdir / EVAL_METRICS)
    }


def _scores(logdir: pathlib.Path) -> dict[str, float]:
    """Returns the BLEU of each direction on the decoded sentences of test."""
    scores = json.loads((logdir / "decode_test/scores.json").read_text())
    return {language["code"]: language["bleu"]["value"] for language in scores["languages"]}


if __name__ == "__main__":
    cli.run("fine_tune", main)
