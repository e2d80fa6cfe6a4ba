"""Runs of models that transformers wrote: their weights, what continues, what is refused."""

import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from bench import import_model
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face import config as configs
from lingvo_gshard.hugging_face import importing, torch_file
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
    """Writes model.safetensors with the arrays that `change` makes of its own."""
    path = folder / "model.safetensors"
    arrays = {name: np.array(x) for name, x in safetensors_file.read(path).arrays.items()}
    change(arrays)
    safetensors_file.write(path, arrays, {"format": "pt"})


def _arrays(logdir):
    with Checkpoints(logdir) as saved:
        return {path: np.asarray(array) for path, array in saved.arrays(0).items()}


@pytest.mark.slow
def test_a_run_holds_the_weights_whatever_the_partitions(tmp_path):
    done = importing.import_folder(models.MODELS / "m2m_100", tmp_path / "run")
    assert (done.model, done.num_weights) == ("nllb.Dense600M", 14552)
    assert not done.has_vocabulary and done.num_continued == 0

    # Two of many, by hand: a table whose first rows change places, and a projection's heads.
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

    # Read onto four devices, and checked there.
    launch = launches.recorded(str(tmp_path / "run"))
    run = open_run(launch, str(tmp_path / "run"), 4)
    restored = run.estimator.restore()
    for path, value in restored.state.FlattenItems():
        np.testing.assert_array_equal(np.asarray(value), arrays[path])


def _weights_of(folder, name):
    config = configs.read(folder)
    params = models.params(name)
    theta = TaskModel(params, placement.partitioning(params, 1)).state_spec.theta
    return Folder(folder, config, params.task, theta).arrays


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


def test_a_process_that_was_stopped_is_continued(tmp_path, monkeypatch):
    """By an interruption in the middle, which leaves what is complete."""
    read = Folder._read
    count = 0

    def interrupted(self, path, index):
        nonlocal count
        count += 1
        if count > 40:
            raise KeyboardInterrupt
        return read(self, path, index)

    folder = models.MODELS / "m2m_100"
    monkeypatch.setattr(Folder, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        importing.import_folder(folder, tmp_path / "run")
    monkeypatch.setattr(Folder, "_read", read)

    # The last line of the journal is cut.
    journal = tmp_path / "run/checkpoints/0.import/journal.jsonl"
    journal.write_text(journal.read_text() + '{"array": "theta.')
    done = importing.import_folder(folder, tmp_path / "run")
    assert 0 < done.num_continued < done.num_arrays

    importing.import_folder(folder, tmp_path / "whole")
    whole = _arrays(tmp_path / "whole")
    for path, array in _arrays(tmp_path / "run").items():
        np.testing.assert_array_equal(array, whole[path])


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
        (_add, r"has model\..*expert_4\.fc1\.weight, which the model has no place for\.$"),
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bart"}, "model_type is 'bart'; expected one of nllb-moe, m2m_100"),
        ({"router_bias": True}, "router_bias is True; expected False"),
        ({"second_expert_policy": "random"}, "second_expert_policy is 'random'; expected 'all'"),
        ({"moe_eval_capacity_token_fraction": 0.5}, "token_fraction is 0.5; expected 1.0"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'; expected one of relu"),
        ({"encoder_attention_heads": 3}, "encoder_attention_heads is 3; expected a divisor"),
        ({"pad_token_id": 3}, r"pad, bos and eos are \[3, 0, 2\]; expected 0, 1 and 2"),
        ({"d_model": "16"}, "d_model is '16'; expected 1 to 262144"),
        ({"d_model": True}, "d_model is True; expected 1 to 262144"),
        ({"encoder_layers": 10**9}, "encoder_layers is 1000000000; expected 1 to 512"),
        ({"num_experts": 8192, "encoder_layers": 512}, "expected at most 131072 experts"),
        ({"encoder_attention_heads": []}, r"encoder_attention_heads is \[\]; expected a divisor"),
        ({"pad_token_id": [1]}, r"pad_token_id is \[1\]; expected an id of the vocabulary"),
        ({"decoder_start_token_id": 47}, "decoder_start_token_id is 47; expected an id"),
        ({"scale_embedding": "yes"}, "scale_embedding is 'yes'; expected true or false"),
        ({"dropout": float("nan")}, "dropout is nan; expected 0 or more, below 1"),
        ({"moe_token_dropout": 1}, "moe_token_dropout is 1; expected 0 or more, below 1"),
        ({"encoder_sparse_step": None}, "encoder_sparse_step is None; expected 0 or more"),
        ({"activation_function": ["relu"]}, r"activation_function is \['relu'\]; expected one of"),
        ({"encoder_layers": 5}, r"lacks model\.encoder\.layers\.4\."),
        ({"dropout": "much"}, "rate is 0.1; expected float"),
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


def test_a_changed_byte_of_a_part_is_found_and_nothing_is_left(tmp_path):
    """In the weights themselves, which are read when the run is there already."""
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


def test_a_part_that_is_missing_is_named(tmp_path):
    folder = _copy(tmp_path, _PARTS)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002\.bin is missing\.$"):
        importing.import_folder(folder, tmp_path / "run")


def test_a_folder_with_checkpoints_is_not_written_over(tmp_path):
    importing.import_folder(models.MODELS / "m2m_100", tmp_path / "run")
    with pytest.raises(ValueError, match=r"run has checkpoints already, of steps \[0\]"):
        importing.import_folder(models.MODELS / "m2m_100", tmp_path / "run")


class _Call:
    """Pickled as a call of os.system."""

    def __reduce__(self):
        return os.system, ("touch called",)


def _saved(path, content, compression=zipfile.ZIP_STORED):
    """Writes a file as torch.save does, with this pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(16))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": _Call()}, 2), "it holds posix.system, which is no tensor"),
        (pickle.dumps({"a": 1}, 2), "it holds other things than tensors"),
        (pickle.dumps({"a": b"x" * 300}, 4), "its pickle has the opcode"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "its pickle has the index 2147483647"),
        # A tuple of the one before, twice, and so on: hashing it would take hours.
        (
            b"\x80\x02}N\x85q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40)),
            "its pickle has a tuple in several places",
        ),
        (b"\x80\x02(NNNNNtQ.", "it refers to something that is no storage"),
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
    """Half a gigabyte, of which the process holds a fraction beyond what it starts with."""
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
