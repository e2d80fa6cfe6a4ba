"""A bundle of a small model with random weights."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.decoding import bundle
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs
from tests.decoding import vocabularies
from tests.layers import building
from tests.spmd import functions


def _model(vocab_size):
    params = registry.get_params("toy.MoE8E4L")
    params.task.Set(source_vocab_size=vocab_size, target_vocab_size=vocab_size, dim=16)
    for stack in (params.task.encoder, params.task.decoder):
        stack.num_layers = 2
    params.decode.Set(batch_size=2, beam_size=3, num_best=2, max_target_len=8)
    return TaskModel(params, functions.partitioning(2))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns the folder of a bundle and the same translator in this process."""
    folder = tmp_path_factory.mktemp("made")
    path = folder / "made.model"
    tokenizer = vocabularies.train(path)
    model = _model(tokenizer.vocab_size)
    spec = DecoderSpec("toy.MoE8E4L", ("de", "fr"), 2, (16,), 2, 2)

    def program_for(source_len):
        return Programs(model, in_process=True).decoder(source_len)

    theta = building.random_theta(model.task)
    decoder = Decoder(spec, theta, program_for)
    bundle.save(folder / "bundle", decoder, (path, path))
    return folder / "bundle", Translator(decoder, tokenizer, tokenizer)
