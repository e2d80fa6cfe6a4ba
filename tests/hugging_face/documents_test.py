"""Fine-tuning an imported decoder on documents, which are encoded by its own tokenizer."""

import json

import numpy as np
import pytest
import tensorflow as tf
import tokenizers

from data_prep.config import BuildConfig
from lingvo_gshard.hugging_face import exporting, importing
from lingvo_gshard.input import bpe_tokenizer
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.text_rows import TextInput
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs.run import open_run
from tests import exhaustive
from tests.data_prep import prepared
from tests.hugging_face import decoders
from tests.layers import building

# mixtral's tokenizer begins a text with BOS; qwen3_moe's begins it with its first piece.
_NAMES = ("mixtral", "qwen3_moe")
_ROW = {"batch_size": 1, "row_len": 40}
_AMPLE = "task.decoder.moe.train_capacity.factor=4.0"


def _nats(name):
    """Returns transformers' loss of each document: see write_bpe.py."""
    return json.loads((decoders.MODELS / name / "texts.json").read_text())["nats"]


def _vocabulary(name):
    return decoders.source(name).vocabulary.model


def _prepare(folder, vocabulary, documents):
    """Prepares documents for training, and one of its own for dev."""
    for split, texts in {"train": documents, "dev": ["die katze sah"]}.items():
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "x.txt").write_text("".join(f"{text}\n" for text in texts))
    config = BuildConfig(kind="text", vocabulary=str(vocabulary))
    return prepared.build(folder / "text", folder / "data", config)


@pytest.fixture(scope="module", params=_NAMES)
def built(request, tmp_path_factory):
    """Returns a model's name, a folder with documents in its pieces, and the manifest."""
    folder = tmp_path_factory.mktemp(request.param)
    vocabulary = folder / "run/vocab/text.model"
    vocabulary.parent.mkdir(parents=True)
    vocabulary.write_bytes(_vocabulary(request.param))
    data = _prepare(folder, folder / "run", list(_nats(request.param)))
    return request.param, folder / "data", data


def test_records_have_the_ids_of_the_tokenizers_library(built):
    name, folder, data = built
    theirs = tokenizers.Tokenizer.from_file(str(decoders.MODELS / name / "tokenizer.json"))
    records = RecordSource(folder, data.language("x").records["train"])
    documents = list(_nats(name))
    _, tokenizer = bpe_tokenizer.load_pair(folder)
    for text, example in zip(documents, records.read(np.arange(len(documents))), strict=True):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert example.target_ids.tolist() == [*decoders.ours(name, np.array(ids)), EOS_ID]
        assert tokenizer.decode(example.target_ids) == theirs.decode(ids)
    assert (folder / data.target_vocabulary.file.path).read_bytes() == _vocabulary(name)
    assert TextInput.Facts(str(folder)).target_vocab_size == 61


def _batch(folder):
    settings = TextInput.Params().Set(data_dir=str(folder), shuffle=False, repeat=False, **_ROW)
    (batch,) = settings.Instantiate()
    return batch


def test_the_loss_of_a_row_of_documents_is_transformers(built):
    name, folder, _ = built
    batch = _batch(folder)
    task = decoders.params(name, "task.decoder.layers_as=UNROLLED").task
    task = task.Instantiate(building.Unannotated())
    theta = decoders.weights(name, task).Transform(tf.constant)
    features = batch.features.Transform(tf.constant)
    labels = batch.labels.Transform(tf.constant)
    _, terms = task.Loss(theta, features, labels, Context(Mode.EVAL))
    got = float(terms.nll * terms.num_tokens)
    assert got == pytest.approx(sum(_nats(name).values()), rel=1e-4)


def test_a_document_begins_as_the_tokenizer_begins_it(built):
    name, folder, _ = built
    batch = _batch(folder)
    begins = (batch.features.segment_ids > 0) & (batch.features.positions == 0)
    _, tokenizer = bpe_tokenizer.load_pair(folder)
    prompts = [tokenizer.prompt(text)[0] for text in _nats(name)]
    assert batch.features.ids[begins].tolist() == prompts
    assert (prompts == [BOS_ID] * 4) == (name == "mixtral")

    # Rows cover every label once, however short they are.
    short = TextInput.Params().Set(data_dir=str(folder), shuffle=False, repeat=False)
    batches = list(short.Set(batch_size=2, row_len=3).Instantiate())
    rows = np.concatenate([batch.labels.labels for batch in batches])
    weights = np.concatenate([batch.labels.weights for batch in batches])
    is_label = batch.labels.weights > 0
    assert rows[weights > 0].tolist() == batch.labels.labels[is_label].tolist()


def test_labels_have_the_bytes_of_the_text(built):
    name, folder, _ = built
    batch = _batch(folder)
    num_bytes = sum(len(text) for text in _nats(name))
    if name == "qwen3_moe":  # The first pieces are no labels.
        num_bytes -= sum(map(len, ("der", "a", "die", "und")))
    assert batch.labels.num_bytes.sum() == num_bytes


def _bytes_vocabulary(folder, decoder, pieces, added=()):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="?"
        )
    )
    tokenizer.decoder = decoder
    tokenizer.add_tokens(list(added))
    tokenizer.add_special_tokens(["<eos>"])
    content = bpe_tokenizer.vocabulary(tokenizer.to_str(), 12, (10, 11, len(pieces) + len(added)))
    path = folder / "text.model"
    path.write_bytes(content)
    return bpe_tokenizer.loaded(path)


def test_bytes_of_pieces(tmp_path):
    decoders_of = tokenizers.decoders
    by_bytes = _bytes_vocabulary(
        tmp_path, decoders_of.ByteLevel(), ["?", "\u0120a", "\u00c3", "\u00c3\u00a4"], ["\u00e4!"]
    )
    spelled = _bytes_vocabulary(
        tmp_path,
        decoders_of.Sequence([decoders_of.Replace("\u2581", " "), decoders_of.ByteFallback()]),
        ["?", "\u2581a", "<0xC3>", "\u00e4"],
        ["\u00e4!"],
    )
    for tokenizer in (by_bytes, spelled):
        theirs = tokenizer._ours  # Our ids of the pieces, in their order.
        assert tokenizer.num_bytes()[theirs].tolist() == [1, 2, 1, 2, 3, *[0] * 7]
        assert np.flatnonzero(tokenizer.begins_with_space()[theirs]).tolist() == [1]
        assert tokenizer.num_byte_pieces(theirs[[0, 2, 2, 3]]) == 2
        assert tokenizer.unk_id == theirs[0]


def test_a_files_own_padding_truncation_and_unknown_token_play_no_part(tmp_path):
    fields = json.loads(_vocabulary("qwen3_moe"))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields["tokenizer"]))
    texts = ["der hund", "die katze sah den hund"]
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]

    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(2)
    fields["tokenizer"] = json.loads(tokenizer.to_str())
    fields["tokenizer"]["model"]["unk_token"] = "nowhere"
    path = tmp_path / "text.model"
    path.write_text(json.dumps(fields))
    ours = bpe_tokenizer.loaded(path)
    ids = [decoders.ours("qwen3_moe", np.array(theirs)).tolist() for theirs in expected]
    assert ours.encode_all(texts) == [[*line, EOS_ID] for line in ids]
    assert [ours.prompt(text) for text in texts] == ids
    assert ours.unk_id == -1


def test_eos_has_no_bytes_even_if_it_is_not_special(tmp_path):
    fields = json.loads(_vocabulary("mixtral"))
    for token in fields["tokenizer"]["added_tokens"]:
        token["special"] = False
    path = tmp_path / "text.model"
    path.write_text(json.dumps(fields))
    num_bytes = bpe_tokenizer.loaded(path).num_bytes()
    assert num_bytes[EOS_ID] == 0 and num_bytes[BOS_ID] == len("<s>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"text\.model: there is no such vocabulary"),
        (b"{", r"text\.model: Expecting property name"),
        (b"{}", r"text\.model: this vocabulary lacks special_ids, tokenizer, vocab_size\."),
        (b"x", r"text\.model is not a SentencePiece model"),
    ],
)
def test_a_vocabulary_that_is_damaged_is_named(tmp_path, content, message):
    path = tmp_path / "text.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _prepare(tmp_path, path, ["der hund"])


def test_folders_that_are_no_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no vocab/text\.model: expected a run of a language"):
        _prepare(tmp_path, decoders.MODELS / "mixtral", ["der hund"])
    assert not (tmp_path / "data/plan.txt").exists()  # The next command may use the folder.
    (tmp_path / "run/vocab").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run has no vocab/text\.model, as a run for data of"):
        _prepare(tmp_path / "2", tmp_path / "run", ["der hund"])


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path):
    fields = json.loads(_vocabulary("mixtral"))
    processor = fields["tokenizer"]["post_processor"]
    processor["single"].append(processor["single"][0])
    path = tmp_path / "text.model"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"text\.model adds <s> <s> to a text; expected"):
        _prepare(tmp_path, path, ["der hund"])


def _settings(**train):
    rows = [f"{name}.{key}={x}" for name in ("input", "eval_input") for key, x in _ROW.items()]
    return [*rows, *(f"train.{name}={value}" for name, value in train.items())]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", *exhaustive.only("mixtral")])
def test_an_imported_run_is_fine_tuned_on_documents(tmp_path, name):
    run_dir = str(tmp_path / "run")
    # Transformers' experts are never full.
    importing.import_folder(decoders.MODELS / name, run_dir, [_AMPLE])
    _prepare(tmp_path, tmp_path / "run", list(_nats(name)))
    settings = _settings(max_steps=30, iterations_per_loop=1)
    launch = launches.launch_of(None, tuple(settings), str(tmp_path / "data"), run_dir)
    run = open_run(launch, run_dir, 1)
    modes.train_and_eval(run)

    lines = (tmp_path / "run/train_metrics.jsonl").read_text().splitlines()
    nll = {line["step"]: line["metrics"]["nll"] for line in map(json.loads, lines)}
    num_labels = _batch(tmp_path / "data").labels.weights.sum()
    assert nll[1] == pytest.approx(sum(_nats(name).values()) / num_labels, abs=1e-4)
    assert nll[30] < 0.95 * nll[1]

    # The exported table has the rows of the tokenizer, although the data does not know them.
    exporting.export_folder(run, tmp_path / "out")
    before = json.loads((decoders.MODELS / name / "config.json").read_text())
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert after["eos_token_id"] == before["eos_token_id"]
    again = importing.import_folder(tmp_path / "out", tmp_path / "again")
    assert again.num_weights == decoders.counts(name)["all"]


def test_data_of_another_vocabulary_is_refused(built, tmp_path):
    name, folder, _ = built
    (other,) = set(_NAMES) - {name}
    run_dir = tmp_path / "run"
    launches.record(decoders.source(other).launch(), str(run_dir), [_vocabulary(other)] * 2)
    launch = launches.launch_of(None, (), str(folder), str(run_dir))
    with pytest.raises(ValueError, match=r"text\.model: this folder's model has another vocab"):
        launches.check_data(launch, str(run_dir))


def test_data_for_a_run_without_a_tokenizer_is_refused(built, tmp_path):
    name, folder, _ = built
    run_dir = tmp_path / "run"
    launches.record(decoders.source(name).launch(), str(run_dir))
    launch = launches.launch_of(None, (), str(folder), str(run_dir))
    with pytest.raises(ValueError, match="run was imported without a tokenizer, so nobody knows"):
        launches.check_data(launch, str(run_dir))
