"""The weights that count as matrices for optimizers: the same ones as in other libraries."""

import numpy as np
import pytest

from lingvo_gshard.checkpoints import stack_forms
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hugging_face import names
from lingvo_gshard.layers.positions import RelativeBias
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.optim.schedules import CosineDecay
from tests.layers import building


def _nllb(layers_as):
    """The weights of stacks with NLLB-MoE's layers."""
    p = TranslationTask.Params().Set(
        source_vocab_size=20, target_vocab_size=20, dim=8, aux_loss_weight=0.01
    )
    for stack in (p.encoder, p.decoder):
        stack.Set(dim=8, num_layers=4, layers_as=layers_as)
        stack.dense.Set(hidden_dim=16, biases=True)
        stack.layer.attention.Set(num_heads=2, head_dim=4, biases=True)
        stack.moe.Set(hidden_dim=16, num_experts=4, group_size=8, biases=True)
    model = p.Instantiate(building.Unannotated()).weight_specs
    return NestedMap(encoder=model.encoder, decoder=model.decoder)


def _name_in_nllb(path, layer, expert):
    return names.name(path, names.Family.NLLB_MOE, layer, expert)


def _matrices_of_transformers(weight_specs):
    """The weights whose tensors have two dims in transformers; biases and norms have one there."""
    specs = {f"theta.{path}": spec for path, spec in weight_specs.FlattenItems()}
    forms = stack_forms.forms_of(specs)
    matrices = set()
    for path, spec in weight_specs.FlattenItems():
        first, *_ = names.pieces(f"theta.{path}", spec, forms, _name_in_nllb)
        is_bias_or_norm = first.name.endswith("bias") or "layer_norm" in first.name
        assert is_bias_or_norm == (len(first.shape) == 1)
        if not is_bias_or_norm:
            matrices.add(path)
    return matrices


@pytest.mark.parametrize("layers_as", list(Layers))
def test_weights_decay_and_are_factored_as_transformers_have_them(layers_as):
    weight_specs = _nllb(layers_as)
    matrices = _matrices_of_transformers(weight_specs)
    paths = dict(weight_specs.FlattenItems())
    assert len(matrices) > 10 and any(path.endswith("_bias") for path in paths)

    schedule = CosineDecay.Params().Set(total_steps=10)
    adamw = AdamW.Params().Set(schedule=schedule, undecayed="").Instantiate()
    adafactor = Adafactor.Params().Instantiate()
    for path, spec in weight_specs.FlattenItems():
        is_matrix = path in matrices
        assert adamw._facts(path, spec)["weight_decay"] == (0.01 if is_matrix else 0.0), path
        slots = adafactor._slot_specs(spec)
        assert sorted(slots) == (["column", "row"] if is_matrix else ["full"]), path
        if not is_matrix:
            assert slots.full.shape == spec.shape


def test_relative_positions_are_biases():
    """T5X does not factor them, either, and transformers does not decay them."""
    p = RelativeBias.Params().Set(num_heads=4)
    table = p.Instantiate(building.Unannotated()).weight_specs.table
    assert not table.is_matrix and np.prod(table.shape) == 4 * 32
