"""Why the MoE layer sums its experts' outputs over the devices before combining them.

E experts, C capacity, H hidden (split), M model, S tokens of a group; E * C is 2 * S.
"""

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.partial import Partial
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_PARTS = Partitioning.from_dict(Mesh.flat(8), {"H": "d"})
_E, _C, _H, _M, _S = 4, 32, 16, 64, 64
_ARGUMENTS = NestedMap(
    hidden_ECH=functions.f32((_E, _C, _H), "ECH"),
    wo_EHM=functions.f32((_E, _H, _M), "EHM"),
    combine_SEC=functions.f32((_S, _E, _C), "SEC"),
)


def _sum_first(batch):
    y_ECM = tf.einsum("ECH,EHM->ECM", batch.hidden_ECH, batch.wo_EHM)
    y_ECM = Annotator(_PARTS).annotate(y_ECM, "ECM")
    return tf.einsum("ECM,SEC->SM", y_ECM, batch.combine_SEC)


def _sum_last(batch):
    y_ECM = Partial.from_einsum(_PARTS, "ECH,EHM->ECM", batch.hidden_ECH, batch.wo_EHM, letter="H")
    return y_ECM.einsum("ECM,SEC->SM", batch.combine_SEC).reduce()


def _gradient(how, batch):
    with tf.GradientTape() as tape:
        tape.watch(batch.combine_SEC)
        loss = tf.reduce_sum(tf.sin(how(batch)))
    return tape.gradient(loss, batch.combine_SEC)


def _summed_numbers(how):
    """Returns the number of float32 values that `how` sums over the devices."""
    made = AnnotatedFn("combine", lambda batch: NestedMap(y=how(batch)), ("batch",), (_ARGUMENTS,))
    report = compile_program(lowering.export(made, _PARTS)).report()
    assert {each.kind for each in report.collective_ops} == {"all-reduce"}
    return sum(each.result_bytes for each in report.collective_ops) // 4


def test_a_sum_after_combine_is_smaller_but_the_gates_gradient_becomes_a_sum_too():
    assert _summed_numbers(_sum_first) == _E * _C * _M
    assert _summed_numbers(_sum_last) == _S * _M
    assert _summed_numbers(lambda batch: _gradient(_sum_first, batch)) == _E * _C * _M
    assert _summed_numbers(lambda batch: _gradient(_sum_last, batch)) == _S * (_M + _E * _C)
