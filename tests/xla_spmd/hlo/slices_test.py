"""Traffic between slices of TPUs, in libtpu's form of a sum over two slices of four TPU v5e."""

import re

import pytest

from tests.xla_spmd.hlo import hlo_text, programs
from xla_spmd.hlo import collectives, hlo_cost
from xla_spmd.hlo.collectives import Collective

# The sum within a slice is a reduce-scatter. The part is sent to the host and comes back as the sum
# of the slices' parts, which are then gathered.
_ATTRIBUTES = (
    '_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_megascale_transfer_type="TYPE",_xla_megascale_target="TARGET",'
    '_xla_megascale_reduce_operation="SUM"'
)
_SUM = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[4096,512]{1,0:T(8,128)} parameter(0)
  part = f32[1024,512]{1,0:T(8,128)} reduce-scatter(x), dimensions={0}, channel_id=1,
    replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=add
  after = token[] after-all()
  send = (f32[1024,512]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(part, after), channel_id=2,
    is_host_transfer=true, frontend_attributes={ATTRIBUTES}
  recv = (f32[1024,512]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(after), channel_id=3,
    is_host_transfer=true, frontend_attributes={ATTRIBUTES}
  y = f32[4096,512]{1,0:T(8,128)} negate(x)
  sent = token[] send-done(send), channel_id=2, is_host_transfer=true
  received = (f32[1024,512]{1,0:T(8,128)}, token[]) recv-done(recv), channel_id=3,
    is_host_transfer=true
  total = f32[1024,512]{1,0:T(8,128)} get-tuple-element(received), index=0
  whole = f32[4096,512]{1,0:T(8,128)} all-gather(total), dimensions={0}, channel_id=4,
    replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true
  ROOT all = (f32[4096,512]{1,0:T(8,128)}, f32[4096,512]{1,0:T(8,128)}) tuple(whole, y)
}
"""
_SLICES = ((0, 1, 2, 3), (4, 5, 6, 7))
_BYTES = 4 * 1024 * 512


def _module(type_, target, num_partitions=8):
    attributes = _ATTRIBUTES.replace("TYPE", type_).replace("TARGET", target)
    return hlo_text.module(_SUM.replace("ATTRIBUTES", attributes), num_partitions)


def test_a_compiled_shift_and_exchange_between_four_slices():
    module = programs.kept("tpu_slices")
    num_bytes = 4 * 256 * 4096
    shift = tuple((4 * i + j, (4 * i + 4) % 16 + j) for j in range(4) for i in range(4))
    across = tuple((j, 4 + j, 8 + j, 12 + j) for j in range(4))
    assert set(collectives.find(module)) == {
        Collective("collective-permute", num_bytes, shift, 1),
        Collective("all-to-all", num_bytes, across, 1),
    }


def test_a_sum_over_slices_is_found_beside_those_within():
    module = _module("ALL_REDUCE", "{1,2}x{0:3}")
    assert collectives.find(module) == (
        Collective("reduce-scatter", _BYTES, _SLICES, 1),
        Collective("all-reduce", _BYTES, ((0, 4), (1, 5), (2, 6), (3, 7)), 1),
        Collective("all-gather", 4 * _BYTES, _SLICES, 1),
    )


def test_it_is_under_way_from_the_receive_to_its_end():
    _, between, _ = collectives.find(_module("ALL_REDUCE", "{1,2}x{0:3}"))
    assert between.beside == ("y", "sent")


def test_a_part_is_read_once_and_its_sum_is_written_once():
    costs = hlo_cost.costs(_module("ALL_REDUCE", "{1,2}x{0:3}"))
    found = {cost.opcode: cost.accessed_bytes for cost in costs}
    assert found["send"] == found["recv"] == _BYTES
    assert not {"send-done", "recv-done", "after-all"} & found.keys()


@pytest.mark.parametrize(
    ("type_", "target", "kind", "groups"),
    [
        ("ALL_GATHER", "{1,2}x{0:1}", "all-gather", ((0, 2), (1, 3))),
        ("ALL_TO_ALL", "{1,2,3}x{0,1}", "all-to-all", ((0, 2, 4), (1, 3, 5))),
        ("REDUCE_SCATTER", "{1:3}x{0}", "reduce-scatter", ((0, 1, 2),)),
        ("ALL_TO_ALL", "{{100000,200000},{100001,200001}}", "all-to-all", ((0, 2), (1, 3))),
        (
            "ONE_TO_ONE",
            "{{100000->200001},{200001->100000}}",
            "collective-permute",
            ((0, 3), (3, 0)),
        ),
        # There are two sets of slices.
        ("ALL_REDUCE", "{1,3}x{0:1},{2,4}x{0:1}", "all-reduce", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_the_attributes_name_the_participants(type_, target, kind, groups):
    _, between, _ = collectives.find(_module(type_, target))
    assert between == Collective(kind, _BYTES, groups, 1)


@pytest.mark.parametrize(
    ("type_", "target", "message"),
    [
        ("SCAN", "{1,2}x{0:3}", "_xla_megascale_transfer_type=SCAN is unknown; known are ALL_RED"),
        ("ALL_REDUCE", "", "_xla_megascale_target='', expected such as {1,2}x{0:255}"),
    ],
)
def test_a_transfer_that_is_not_understood_is_refused(type_, target, message):
    with pytest.raises(ValueError, match=re.escape(f"recv: {message}")):
        collectives.find(_module(type_, target))
