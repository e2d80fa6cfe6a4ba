"""The products of a forward pass, and their gradients."""

import math

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.positions import RelativeBias
from lingvo_gshard.model.flops import step_flops
from lingvo_gshard.model.forward_pass import Einsum, forward_products
from lingvo_gshard.model.step_products import products_of

_SIZES = ("task.source_vocab_size=4096", "task.target_vocab_size=2048", "input.target_len=64")


def _traced(params):
    return products_of(params.task, params.input.cls.batch_specs(params.input))


@pytest.fixture(scope="module")
def products():
    return forward_products(_traced(registry.get_params("toy.MoE8E4L", _SIZES)))


def test_sizes_come_from_the_batch_and_the_weight(products):
    (gate, *_) = [each for each in products if str(each.einsum) == "GSM,M_->GS_"]
    sizes = gate.einsum.sizes
    assert sizes["M"] == 128 and sizes["_"] == 8
    assert sizes["G"] * sizes["S"] == 32 * 64

    (dispatch, *_) = [each for each in products if str(each.einsum) == "GSEC,GSM->GECM"]
    sizes = dispatch.einsum.sizes
    assert sizes["E"] * sizes["C"] == 2 * sizes["S"]  # Two places a token.


def test_tokens_move_to_the_experts_and_back(products):
    moved = {str(each.einsum): each.moved for each in products if each.moved}
    assert moved == {"GSEC,GSM->GECM": "EGCM", "EGCH,EHM->EGCM": "GECM"}


def test_embeddings_are_looked_up_and_large_products_kept(products):
    lookups = {str(each.einsum) for each in products if each.is_lookup}
    assert "BLV,VM->BLM" in lookups and "BLM,MV->BLV" not in lookups
    kept = {str(each.einsum): each.kept for each in products}
    assert kept["BLM,MV->BLV"] is Remat.BLOCK  # The softmax is outside the stacks.
    assert kept["EGCM,EMH->EGCH"] is Remat.ALL_BUT_PRODUCTS
    assert kept["BNLD,BNTD->BNLT"] is Remat.NONE


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "equation"), [(True, "BLM,VM->BLV"), (False, "BLM,MV->BLV")])
def test_a_language_models_products(tied, equation):
    """A tied softmax is a product like any other; biases, also by distances, are not products."""
    params = registry.get_params("toy.LmMoE8E4L", ("task.vocab_size=2048",))
    params.task.tied_softmax = tied
    params.task.decoder.dense.Set(gated=True, biases=True)
    params.task.decoder.layer.attention.Set(biases=True, positions=RelativeBias.Params())
    traced = _traced(params)
    products = forward_products(traced)

    (softmax,) = (product for product in products if product.stack == "softmax")
    assert str(softmax.einsum) == equation and softmax.kept is Remat.BLOCK
    flops = 3 * sum(_flops(product) for product in products)
    # With dispatch, and norms as products.
    assert flops == pytest.approx(step_flops(traced), rel=0.03)


def _flops(product):
    sizes = [product.einsum.sizes[letter] for letter in product.einsum.letters]
    return 0 if product.is_lookup else 2 * product.times * math.prod(sizes)


def test_the_gradients_of_an_einsum():
    product = Einsum("BLM", "MH", "BLH", {"B": 2, "L": 3, "M": 5, "H": 7})
    assert product.has_weight and product.letters == "BLMH"
    assert str(product.left_gradient()) == "BLH,MH->BLM"
    assert str(product.right_gradient()) == "BLM,BLH->mh"  # Where the weight is updated.
    attention = Einsum.parse("BNLD,BNTD->BNLT")
    assert not attention.has_weight
    assert str(attention.right_gradient()) == "BNLD,BNLT->BNTD"


def test_blocks_at_once():
    stacked = Einsum.parse("BLM,MH->BLH").stacked({"R": 4})
    assert str(stacked) == "RBLM,RMH->RBLH" and stacked.sizes == {"R": 4}
    assert str(stacked.right_gradient()) == "RBLM,RBLH->rmh"
