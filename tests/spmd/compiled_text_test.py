"""Reading compiled text: groups in each form, bytes, loops within loops."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.spmd import compiled_text, program
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.compiled_text import Collective, Loop
from tests.spmd import functions

_TEXT = """
HloModule toy, is_scheduled=true, num_partitions=6

%inner_body (p: (s32[], f32[4,3])) -> (s32[], f32[4,3]) {
  %x = (f32[2,3]{1,0:T(2,128)}, /*index=1*/bf16[5]{0}) all-reduce(%a, %b), replica_groups=[2,3]<=[3,2]T(1,0), to_apply=%add
}

%outer_body (p: (s32[], /*index=1*/f32[4,3])) -> (s32[], f32[4,3]) {
  %w.2 = (s32[], f32[4,3]) while(%t), condition=%c, body=%inner_body, backend_config={"known_trip_count":{"n":"7"}}
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[3,2]<=[6], dimensions={0}
  %h = f32[8]{0} all-gather-done(%g)
}

%endless_body (p: s32[]) -> s32[] {
  %r = u8[3,2] reduce-scatter(%p), replica_groups={}, to_apply=%add
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="= f32[9] all-reduce(x) while("}
  %w.1 = (s32[], f32[4,3]) while(%t), condition=%c, body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}
  %w.0 = s32[] while(%t), condition=%c, body=%endless_body
  %s = (pred[3], pred[3], u32[], u32[]) collective-permute-start(%q), source_target_pairs={{0,1},{1,0}}
  ROOT %f = s4[5] all-to-all(%s), replica_groups={{0,3},{4,1},{2,5}}
}
"""  # noqa: E501


def test_every_form_of_groups_bytes_and_loops():
    text = compiled_text.parse(_TEXT)
    assert text.collectives == (
        Collective("all-reduce", 4 * 6 + 2 * 5, ((0, 2, 4), (1, 3, 5)), 35),
        Collective("all-gather", 4 * 8, ((0, 1), (2, 3), (4, 5)), 5),
        Collective("reduce-scatter", 6, ((0, 1, 2, 3, 4, 5),), None),
        Collective("collective-permute", 3, ((0, 1), (1, 0)), 1),
        Collective("all-to-all", 3, ((0, 3), (4, 1), (2, 5)), 1),
    )
    assert [op.group_size for op in text.collectives] == [3, 2, 6, 2, 2]
    assert text.loops == (Loop("w.2", 7), Loop("w.1", 5), Loop("w.0", None))
    assert text.num_instructions == 10


def test_groups_in_an_unknown_form_are_refused():
    text = _TEXT.replace("replica_groups={}", "replica_groups=@mesh{x}")
    with pytest.raises(ValueError, match=r"in no known form: replica_groups=@mesh\{x\}"):
        compiled_text.parse(text)


def test_a_compiled_loop_over_two_axes():
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"B": "x", "M": "y"})

    def fn(state: NestedMap) -> NestedMap:
        def body(i, x_BM):
            product = tf.einsum("bm,mn->bn", x_BM, state.w_MM)
            return i + 1, parts.annotate(tf.tanh(product), "BM")

        _, x_BM = tf.while_loop(lambda i, _: i < 5, body, [tf.constant(0), state.x_BM])
        return NestedMap(whole=annotate.replicate(x_BM))

    args = NestedMap(x_BM=functions.f32((6, 12), "BM"), w_MM=functions.f32((12, 12), "M_"))
    annotated = AnnotatedFn("loop", fn, ("state",), (args,))
    report = program.export(annotated, parts).compile().report()
    rows, columns = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [loop.trip_count for loop in report.loops] == [5]
    # Each product's 3 rows are summed over y in the loop; gathered over y, then over x, after it.
    assert set(report.collective_ops) == {
        Collective("all-reduce", 4 * 3 * 12, rows, 5),
        Collective("all-gather", 4 * 3 * 12, rows, 1),
        Collective("all-gather", 4 * 6 * 12, columns, 1),
    }
    lines = [line.split() for line in report.table().splitlines()]
    assert ["all-reduce", "1", "144", "5", "2", "4"] in lines
    assert lines[-1][-2:] == ["5", "trips"]
