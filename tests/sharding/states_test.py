"""Signatures, compared with a literal simulation in NumPy of the devices' computation."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.sharding import states

_SIZES = {"A": 4, "K": 6, "B": 8, "G": 4, "S": 6, "E": 2, "C": 8, "M": 10}


def _local(tensor, state, rng):
    """Returns the part of a tensor, in a given state, on each of two devices."""
    if state == "B":
        return [tensor, tensor]
    if state == "P":
        term = rng.standard_normal(tensor.shape)
        return [term, tensor - term]
    return np.split(tensor, 2, int(state[2]))


def _states_of(parts, whole):
    """Returns all states in which the devices' parts represent the whole."""
    candidates = {"P": sum(parts)}
    for dim in range(whole.ndim):
        candidates[f"S({dim})"] = np.concatenate(parts, dim)
    matching = {
        state
        for state, tensor in candidates.items()
        if tensor.shape == whole.shape and np.allclose(tensor, whole)
    }
    if all(part.shape == whole.shape and np.allclose(part, whole) for part in parts):
        matching.add("B")
    return matching


@pytest.mark.parametrize(
    "equation", ["AK,KB->AB", "AK,A->AK", "GSEC,GSM->EGCM", "AK->A", "AK,KB,B->A"]
)
def test_a_result_has_a_state_exactly_where_the_devices_can_compute_it(equation):
    rng = np.random.default_rng(1)
    operands = equation.split("->")[0].split(",")
    tensors = [rng.standard_normal([_SIZES[letter] for letter in dims]) for dims in operands]
    whole = np.einsum(equation, *tensors)

    for combination in itertools.product(*(states.all_states(t.ndim) for t in tensors)):
        local = [_local(*each, rng) for each in zip(tensors, combination, strict=True)]
        try:
            parts = [np.einsum(equation, *on_device) for on_device in zip(*local, strict=True)]
        except ValueError:  # The parts' sizes differ.
            parts = []
        computed = _states_of(parts, whole) if parts else set()

        result = states.einsum_state(equation, combination)
        assert ({result} if result else set()) == computed, combination


def test_the_product_of_two_matrices_has_the_articles_six_signatures():
    signatures = []
    for factors in itertools.product(states.all_states(2), repeat=2):
        signatures.append((*factors, states.einsum_state("AK,KB->AB", factors)))

    assert {signature for signature in signatures if signature[-1] is not None} == {
        ("S(0)", "B", "S(0)"),
        ("B", "S(1)", "S(1)"),
        ("S(1)", "S(0)", "P"),
        ("B", "B", "B"),
        ("P", "B", "P"),
        ("B", "P", "P"),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["B"], r"'AK,KB->AB' has 2 operands, got states \('B',\)"),
        (["S(2)", "B"], r"operand 'AK' has state 'S\(2\)'; known: S\(0\), S\(1\), B, P"),
    ],
)
def test_an_invalid_state_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        states.einsum_state("AK,KB->AB", given)


def test_an_equation_names_its_result():
    with pytest.raises(ValueError, match="'AK,KB': expected the result's letters after ->"):
        states.einsum_state("AK,KB", ["S(0)", "B"])
