"""Runs of models that transformers wrote: weights, continuing after a kill, errors."""

import json
import os
import pickle
import re
import shutil
import zipfile

import numpy as np
import pytest

from bench import import_model
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face import families, importing, torch_file
from lingvo_gshard.hugging_face.folder import Folder
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import open_run
from tests.hugging_face import models

_PARTS = "nllb_moe_bin"


def _copy(tmp_path, name):
    folder = tmp_path / "theirs"
    shutil.copytree(models.MODELS / name, folder)
    return folder


def _change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _rewrite(folder, change):
    """Rewrites model.safetensors after `change` has changed its arrays."""
    path = folder / "model.safetensors"
    arrays = {name: np.array(x) for name, x in safetensors_file.read(path).arrays.items()}
    change(arrays)
    safetensors_file.write(path, arrays, {"format": "pt"})


def _arrays(logdir):
    with Checkpoints(logdir) as saved:
        return {path: np.asarray(array) for path, array in saved.arrays(0).items()}


@pytest.mark.slow
def test_a_run_holds_the_weights_on_any_number_of_partitions(tmp_path):
    done = importing.import_folder(models.MODELS / "m2m_100", tmp_path / "run")
    assert (done.model, done.num_weights) == ("nllb.Dense600M", 14552)
    assert not done.has_vocabulary and done.num_continued == 0

    # Two arrays are compared by hand: a table whose first rows change places, and heads.
    arrays = _arrays(tmp_path / "run")
    theirs = safetensors_file.read(models.MODELS / "m2m_100/model.safetensors").arrays
    table = theirs["model.shared.weight"]
    np.testing.assert_array_equal(
        arrays["theta.target_embedding.table"], np.float32(table[[1, 0, *range(2, 47)]])
    )
    query = np.float32(theirs["model.decoder.layers.1.encoder_attn.q_proj.weight"])
    own = arrays["theta.decoder.block[0].source_attention.wq"][1]
    np.testing.assert_array_equal(own[:, 2, 3], query[2 * 4 + 3])
    assert arrays["step"] == 0

    # They are read onto four devices, and checked there.
    launch = launches.recorded(str(tmp_path / "run"))
    run = open_run(launch, str(tmp_path / "run"), 4)
    restored = run.estimator.restore()
    for path, value in restored.state.FlattenItems():
        np.testing.assert_array_equal(np.asarray(value), arrays[path])


def _weights_of(folder, name):
    config = families.read(folder)
    params = models.params(name)
    theta = TaskModel(params, placement.partitioning(params, 1)).state_spec.theta
    return Folder(folder, config, theta).arrays


def test_parts_of_torch_save_are_the_same_weights():
    got = _weights_of(models.MODELS / _PARTS, "nllb_moe")
    want = _weights_of(models.MODELS / "nllb_moe", "nllb_moe")
    assert got.keys() == want.keys()
    for path, array in want.items():
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(array), err_msg=path)


def test_parts_of_arrays_are_parts_of_the_whole():
    for path, array in _weights_of(models.MODELS / "nllb_moe", "nllb_moe").items():
        index = tuple(slice(size // 3, size) for size in array.shape)
        np.testing.assert_array_equal(array[index], np.asarray(array)[index], err_msg=path)


def _drop(arrays):
    del arrays["model.encoder.layers.1.ffn.experts.expert_2.fc1.weight"]


def _add(arrays):
    arrays["model.encoder.layers.1.ffn.experts.expert_4.fc1.weight"] = np.zeros((24, 16), "float16")


def _reshape(arrays):
    arrays["model.shared.weight"] = arrays["model.shared.weight"][:-1]


def _retype(arrays):
    arrays["model.shared.weight"] = arrays["model.shared.weight"].astype("int32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"lacks model\.encoder\.layers\.1\.ffn\.experts\.expert_2\.fc1\.weight\.$"),
        (_add, r"has model\..*expert_4\.fc1\.weight, which the model does not have\.$"),
        (_reshape, r"model\.shared\.weight has the shape \[46, 16\]; expected \[47, 16\]\.$"),
        (_retype, r"model\.shared\.weight is int32; expected one of float32, "),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(tmp_path, change, message):
    folder = _copy(tmp_path, "nllb_moe")
    _rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        importing.import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bad", "dtype"),
    [
        ("model.encoder.layers.1.ffn.experts.expert_3.fc2.weight", np.inf, "float32"),
        ("model.encoder.layers.0.ffn.fc1.bias", 1e300, "float64"),
    ],
)
def test_tensors_that_are_not_finite_are_refused_by_name(tmp_path, name, bad, dtype):
    def change(arrays):
        values = arrays[name].astype(dtype)
        values.reshape(-1)[[5, -1]] = bad
        arrays[name] = values

    folder = _copy(tmp_path, "nllb_moe")
    _rewrite(folder, change)
    message = rf"model\.safetensors: {re.escape(name)} has 2 numbers that are not finite \(NaN"
    with pytest.raises(ValueError, match=message):
        importing.import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bart"}, "model_type is 'bart'; expected one of nllb-moe, m2m_100"),
        ({"router_bias": True}, "router_bias is True; expected False"),
        ({"moe_eval_capacity_token_fraction": 0.5}, "token_fraction is 0.5; expected 1.0"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'; expected one of relu"),
        ({"encoder_attention_heads": 3}, "encoder_attention_heads is 3; expected a divisor"),
        ({"pad_token_id": 3}, r"pad, bos and eos are \[3, 0, 2\]; expected 0, 1 and 2"),
        ({"d_model": "16"}, "d_model is '16'; expected 1 to 262144"),
        ({"num_experts": 8192, "encoder_layers": 512}, "expected at most 131072 experts"),
        ({"decoder_start_token_id": 47}, "decoder_start_token_id is 47; expected an id"),
        ({"scale_embedding": "yes"}, "scale_embedding is 'yes'; expected true or false"),
        ({"dropout": float("nan")}, "dropout is nan; expected 0 or more, below 1"),
        ({"dropout": 10**400}, r"dropout is 10+\.+0+; expected 0 or more, below 1"),
        ({"encoder_sparse_step": None}, "encoder_sparse_step is None; expected 0 or more"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}; expected None"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder is True; expected False"),
        ({"hidden_size": 32}, "hidden_size is 32; expected 16, as d_model"),
        ({"encoder_layers": 5}, r"lacks model\.encoder\.layers\.4\."),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, values, message):
    folder = _copy(tmp_path, "nllb_moe")
    _change_config(folder, **values)
    with pytest.raises(ValueError, match=message):
        importing.import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def _long_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def _no_weights(folder):
    (folder / "model.safetensors").unlink()


def _no_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "model.safetensors: not a safetensors file of weights, or a damaged one"),
        (_long_header, "a header of 4611686018427387904 bytes"),
        (_no_weights, "has no weights: neither model.safetensors nor pytorch_model.bin"),
        (_no_config, "config.json is missing: give the folder of a model of transformers"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    folder = _copy(tmp_path, "m2m_100")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        importing.import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_changed_byte_of_a_part_is_found_and_nothing_is_left(tmp_path):
    """The weights are read after the run's folder was created."""
    folder = _copy(tmp_path, _PARTS)
    path = folder / "pytorch_model-00001-of-00002.bin"
    span = next(iter(torch_file.spans(path).values()))
    content = bytearray(path.read_bytes())
    content[span.offset] ^= 1
    path.write_bytes(content)

    run = tmp_path / "run"
    run.mkdir()
    (run / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="00001-of-00002.bin is damaged: the tensor at byte"):
        importing.import_folder(folder, run)
    assert [entry.name for entry in run.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_a_folder_with_checkpoints_is_not_written_over(tmp_path):
    importing.import_folder(models.MODELS / "m2m_100", tmp_path / "run")
    with pytest.raises(ValueError, match=r"run has checkpoints already, of steps \[0\]"):
        importing.import_folder(models.MODELS / "m2m_100", tmp_path / "run")


class _Call:
    """Its pickle calls os.system."""

    def __reduce__(self):
        return os.system, ("touch called",)


def _saved(path, content, compression=zipfile.ZIP_STORED):
    """Writes a file like torch.save's, with this pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(16))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": _Call()}, 2), "it holds posix.system, which is not a tensor"),
        (pickle.dumps({"a": 1}, 2), "it holds other things than tensors"),
        (pickle.dumps({"a": b"x" * 300}, 4), "its pickle has the opcode"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "its pickle has the index 2147483647"),
        # Each tuple holds the previous one twice: hashing the last one would take hours.
        (
            b"\x80\x02}N\x85q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40)),
            "its pickle has a tuple in several places",
        ),
        (b"\x80\x02(NNNNNtQ.", "it refers to something that is not a storage"),
        (b"\x80\x02\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "not a file of tensors"),
        (b"", "not a file of tensors"),
    ],
)
def test_pickles_of_other_things_are_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        torch_file.spans(_saved(tmp_path / "model.bin", content))
    assert not (tmp_path / "called").exists()


def _tensor_pickle(count, shape, stride):
    """Returns the pickle of one float32 tensor in data/0, opcode by opcode."""
    shape_text = b"".join(b"K" + bytes([size]) for size in shape)
    stride_text = b"".join(b"K" + bytes([step]) for step in stride)
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK"
        + bytes([count])
        + b"tQ"
    )
    arguments = b"(" + storage + b"K\x00(" + shape_text + b"t(" + stride_text + b"t\x89}t"
    return b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_tensors_end_in_their_storages(tmp_path):
    path = _saved(tmp_path / "model.bin", _tensor_pickle(4, (2, 2), (2, 1)))
    assert torch_file.spans(path)["a"].read().tolist() == [[0, 0], [0, 0]]
    for count, shape, stride, message in [
        (5, (2, 2), (2, 1), "data/0 has 16 bytes for 5 of float32"),
        (4, (3, 2), (2, 1), r"a tensor of shape \(3, 2\) at 0 in 4 elements"),
        (4, (2, 2), (1, 2), r"a tensor of shape \(2, 2\) has strides \(1, 2\)"),
    ]:
        path = _saved(tmp_path / "model.bin", _tensor_pickle(count, shape, stride))
        with pytest.raises(ValueError, match=message):
            torch_file.spans(path)
    # An archive with a password.
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.bin: not a file of tensors .*encrypted"):
        torch_file.spans(path)

    path = _saved(path, _tensor_pickle(4, (2, 2), (2, 1)), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="data/0 is compressed"):
        torch_file.spans(path)


@pytest.mark.slow
def test_64_parts_take_little_memory_and_a_killed_import_continues(tmp_path):
    """Of half a gigabyte, the process holds a fraction in memory."""
    theirs = tmp_path / "theirs"
    num_bytes = import_model.write(theirs, num_experts=12, num_parts=64)
    assert num_bytes > 5e8
    import_model.write(tmp_path / "small", num_experts=2, num_parts=1)
    base_bytes, _ = import_model.imported(tmp_path / "small", tmp_path / "small_run")

    import_model.kill_in_the_middle(theirs, tmp_path / "run")
    peak_bytes, _ = import_model.imported(theirs, tmp_path / "run")
    assert peak_bytes - base_bytes < num_bytes / 3

    with Checkpoints(tmp_path / "run") as saved:
        wi = saved.arrays(0)["theta.encoder.block[1].feed_forward.wi"]
    name = "model.encoder.layers.3.ffn.experts.expert_11.fc1.weight"
    index = json.loads((theirs / "model.safetensors.index.json").read_text())
    tensors = safetensors_file.read(theirs / index["weight_map"][name]).arrays
    np.testing.assert_array_equal(wi[1:2, 11:12][0, 0], tensors[name].T)


# --- other contents of a folder ---


def _with_tables(folder, is_tied, **tables):
    """Gives m2m_100 other tables, each of which is its own plus a number."""
    names = {
        "shared": "model.shared.weight",
        "source": "model.encoder.embed_tokens.weight",
        "target": "model.decoder.embed_tokens.weight",
        "softmax": "lm_head.weight",
    }

    def change(arrays):
        table = arrays.pop("model.shared.weight")
        for key, added in tables.items():
            arrays[names[key]] = table + np.float16(added)

    _rewrite(folder, change)
    _change_config(folder, tie_word_embeddings=is_tied)


def _imported(folder):
    """Returns the arrays of a folder, and the lines that name unused contents."""
    source = importing.read(folder)
    params = launches.experiment_params(source.launch())
    theta = TaskModel(params, placement.partitioning(params, 1)).state_spec.theta
    files = Folder(folder, source.config, theta)
    return {path: np.asarray(x) for path, x in files.arrays.items()}, importing.not_used(
        source, files
    )


@pytest.mark.parametrize("name", ["source", "target", "softmax"])
def test_tables_that_are_tied_and_differ_are_refused(tmp_path, name):
    """transformers 4 uses model.shared.weight for all of them, and 5 uses each one."""
    folder = _copy(tmp_path, "m2m_100")
    _with_tables(folder, True, shared=0, **{name: 1})
    with pytest.raises(ValueError, match="are one table by tie_word_embeddings, and differ"):
        _imported(folder)


def test_equal_copies_of_a_table_are_one(tmp_path):
    want, _ = _imported(models.MODELS / "m2m_100")
    folder = _copy(tmp_path, "m2m_100")
    _with_tables(folder, True, shared=0, source=0, target=0, softmax=0)
    got, not_used = _imported(folder)
    assert got.keys() == want.keys() and "tensors" not in str(not_used)
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array)


def test_tables_that_are_not_tied_are_kept_apart(tmp_path):
    """Like transformers 4.57.6 and 5.24.0, which then do not use the shared one."""
    folder = _copy(tmp_path, "m2m_100")
    _with_tables(folder, False, shared=0, source=1, target=2, softmax=3)
    got, not_used = _imported(folder)
    base = got["theta.source_embedding.table"] - 1
    np.testing.assert_allclose(got["theta.target_embedding.table"], base + 2, atol=1e-2)
    np.testing.assert_allclose(got["theta.softmax"].T, base + 3, atol=1e-2)
    assert "tensors: model.shared.weight" in not_used


_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_git_lfs_pointer_is_named(tmp_path, file):
    folder = _copy(tmp_path, "m2m_100")
    (folder / file).write_text(_POINTER)
    with pytest.raises(ValueError, match=rf"{file} is a git-lfs pointer, .*git lfs pull"):
        _imported(folder)


def test_forms_of_weights_are_preferred_as_by_transformers(tmp_path):
    """A single safetensors file is preferred to several, and these to torch.save's."""
    folder = _copy(tmp_path, "m2m_100")
    want, _ = _imported(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "x.safetensors"}}')
    (folder / "pytorch_model.bin").write_text(_POINTER)
    got, not_used = _imported(folder)
    np.testing.assert_array_equal(got["theta.encoder.norm.scale"], want["theta.encoder.norm.scale"])
    (files,) = [line for line in not_used if line.startswith("files: ")]
    assert "model.safetensors.index.json, pytorch_model.bin" in files

    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"x\.safetensors is missing\.$"):
        _imported(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a git-lfs pointer"):
        _imported(folder)


def test_weights_of_other_formats_and_adapters_are_refused(tmp_path):
    folder = _copy(tmp_path, "m2m_100")
    path = folder / "model.safetensors"
    arrays = {name: np.array(x) for name, x in safetensors_file.read(path).arrays.items()}
    safetensors_file.write(path, arrays, {"format": "tf"})
    with pytest.raises(ValueError, match="its metadata has the format 'tf'; expected 'pt'"):
        _imported(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json: an adapter changes the model's"):
        _imported(folder)


@pytest.mark.parametrize(
    ("generation", "settings"),
    [
        ({}, []),
        ({"max_length": 9, "num_beams": None}, ["max_target_len=8"]),
        (
            {"do_sample": True, "top_p": 0.9},
            ["beam_size=1", "temperature=1.0", "top_k=47", "top_p=0.9"],
        ),
        (
            {"num_beams": 1, "length_penalty": 2, "min_new_tokens": 3},
            ["min_target_len=4", "length_norm_alpha=0.0", "beam_size=1"],
        ),
    ],
)
def test_settings_of_generate_are_those_of_decoding(tmp_path, generation, settings):
    """They are in generation_config.json or, as in early versions, in config.json."""
    folder = _copy(tmp_path, "m2m_100")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    source = importing.read(folder)
    assert source.decode_settings == tuple(f"decode.{setting}" for setting in settings)
    launches.experiment_params(source.launch())

    (folder / "generation_config.json").unlink()
    _change_config(folder, **generation)
    assert importing.read(folder).decode_settings == source.decode_settings


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"num_beams": 0}, r"generation_config\.json: num_beams is 0; expected 1 to 1024"),
        ({"early_stopping": "always"}, "early_stopping is 'always'; expected true, false or"),
        ({"max_length": 5, "min_length": 6}, "of at least 6 tokens and at most 4"),
        ({"eos_token_id": None}, r"eos_token_id is None; expected 2, as in config\.json"),
        ({"decoder_start_token_id": 40}, "decoder_start_token_id is 40; expected 2"),
    ],
)
def test_settings_that_generate_does_not_take_are_refused(tmp_path, generation, message):
    folder = _copy(tmp_path, "m2m_100")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=message):
        importing.read(folder)
