"""Reading compiled text: kinds, bytes, groups, loops within loops."""

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import compiled_text
from lingvo_gshard.hlo.compiled_text import Collective, Loop
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions

_TEXT = """
HloModule toy, is_scheduled=true, num_partitions=6

%inner_body (p: (s32[], f32[4,3])) -> (s32[], f32[4,3]) {
  ROOT %x = (f32[2,3]{1,0:T(2,128)}, /*index=1*/bf16[5]{0}) all-reduce(%a, %b), replica_groups=[2,3]<=[3,2]T(1,0), to_apply=%add
}

%outer_body (p: (s32[], /*index=1*/f32[4,3])) -> (s32[], f32[4,3]) {
  %t = (s32[], f32[4,3]) parameter(0)
  %w.2 = (s32[], f32[4,3]) while(%t), condition=%c, body=%inner_body, backend_config={"known_trip_count":{"n":"7"}}
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[3,2]<=[6], dimensions={0}
  ROOT %h = f32[8]{0} all-gather-done(%g)
}

%endless_body (p: s32[]) -> s32[] {
  ROOT %r = u8[3,2] reduce-scatter(%p), replica_groups={}, to_apply=%add
}

%c (p: (s32[], f32[4,3])) -> pred[] {
  %p = (s32[], f32[4,3]) parameter(0)
  ROOT %maybe = pred[] custom-call(%p), custom_call_target="ask"
}

%add (p: f32[]) -> f32[] {
  ROOT %p = f32[] parameter(0)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="= f32[9] all-reduce(x) while("}
  %w.1 = (s32[], f32[4,3]) while(%p), condition=%c, body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}
  %w.0 = s32[] while(%p), condition=%c, body=%endless_body
  %s = (pred[3], pred[3], u32[], u32[]) collective-permute-start(%q), source_target_pairs={{0,1},{1,0}}
  ROOT %f = s4[5] all-to-all(%s), replica_groups={{0,3},{4,1},{2,5}}, metadata={op_name="jit/call_tf/moe/Einsum"}
}
"""  # noqa: E501

# As compilers for TPUs write them.
_FUSED = """
HloModule toy, num_partitions=2

%starts (p: f32[4]) -> (f32[4], f32[8]) {
  %p = f32[4]{0} parameter(0)
  %all-gather.1 = f32[8]{0:T(8,128)S(1)} all-gather(%p), channel_id=2, replica_groups={{0,1}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (f32[4]{0}, f32[8]{0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%goes_on (p: f32[4], x: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[4]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %all-gather.2 = f32[8]{0} all-gather(%p), channel_id=2, replica_groups={{0,1}}, dimensions={0}, frontend_attributes={chain_id="0"}
  %tanh.1 = f32[8]{0} tanh(%x)
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%tanh.1, %all-gather.2)
}

%all-reduce-scatter.3 (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %all-reduce.3 = f32[8,4]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %partition-id.1 = u32[] partition-id()
  ROOT %dynamic-slice.1 = f32[4,4]{1,0} dynamic-slice(%all-reduce.3, %partition-id.1), dynamic_slice_sizes={4,4}
}

%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}

%wrapped (p: f32[6]) -> f32[6] {
  %p = f32[6]{0} parameter(0)
  ROOT %all-to-all.4 = f32[6]{0} all-to-all(%p), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (p: f32[4], x: f32[8], m: f32[8,4], v: f32[6]) -> f32[4,4] {
  %p = f32[4]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %m = f32[8,4]{1,0} parameter(2)
  %v = f32[6]{0} parameter(3)
  %start = (f32[4]{0}, f32[8]{0}) fusion(%p), kind=kCustom, calls=%starts
  %fusion.2 = (f32[8]{0}, f32[8]{0}) fusion(%p, %x), kind=kOutput, calls=%goes_on
  %a2a.s = ((f32[6]{0}), f32[6]{0}, u32[]) async-start(%v), calls=%wrapped
  %a2a.d = f32[6]{0} async-done(%a2a.s), calls=%wrapped
  %rag.s = ((f32[6]{0}, s32[2]{0}), f32[12]{0}) ragged-all-to-all-start(%v), replica_groups={{0,1}}
  %rag.d = f32[12]{0} ragged-all-to-all-done(%rag.s)
  %all.s = (f32[6]{0}, f32[3]{0}) all-reduce-start(%v, %v), replica_groups={{0,1}}, to_apply=%add
  %all.d = (f32[6]{0}, f32[3]{0}) all-reduce-done(%all.s)
  %cast = f32[6]{0} collective-broadcast(%v), replica_groups={{0,1}}
  ROOT %fusion.3 = f32[4,4]{1,0} fusion(%m), kind=kCustom, calls=%all-reduce-scatter.3
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
    assert text.loops == (Loop("w.1", 5), Loop("w.2", 7), Loop("w.0", None))
    assert text.num_instructions == 14
    assert [op.op_name for op in text.collectives] == [""] * 4 + ["jit/call_tf/moe/Einsum"]


def test_what_is_fused_or_asynchronous_counts_once():
    both = ((0, 1),)
    assert compiled_text.parse(_FUSED).collectives == (
        Collective("all-gather", 4 * 8, both, 1),
        Collective("reduce-scatter", 4 * 4 * 4, both, 1),
        Collective("all-to-all", 4 * 6, both, 1),
        Collective("ragged-all-to-all", 4 * 12, both, 1),
        Collective("all-reduce", 4 * (6 + 3), both, 1),
        Collective("collective-broadcast", 4 * 6, both, 1),
    )


def test_a_compiled_loop_over_two_axes():
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"B": "x", "M": "y"})

    def fn(state: NestedMap) -> NestedMap:
        def body(i, x_BM):
            product = tf.einsum("bm,mn->bn", x_BM, state.w_MM)
            return i + 1, Annotator(parts).annotate(tf.tanh(product), "BM")

        _, x_BM = tf.while_loop(lambda i, _: i < 5, body, [tf.constant(0), state.x_BM])
        return NestedMap(whole=annotate.replicate(x_BM))

    args = NestedMap(x_BM=functions.f32((6, 12), "BM"), w_MM=functions.f32((12, 12), "M_"))
    annotated = AnnotatedFn("loop", fn, ("state",), (args,))
    report = compile_program(lowering.export(annotated, parts)).report()
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
