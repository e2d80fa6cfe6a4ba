"""Overlap on TPUs: buffers passed on, memory of a core, permutes in both directions.

The programs are shortened versions of libtpu's programs for TPU v5e.
"""

import pytest

from tests.xla_spmd.hlo import hlo_text, programs
from xla_spmd.hlo import collectives, hlo_cost
from xla_spmd.hlo.collectives import Collective


@pytest.mark.parametrize("reads", [False, True])
def test_factors_gathered_by_the_fusion_itself_are_read(reads):
    """The gathered weights may be an operand in the very fusion that waits for them."""
    text = """
    ends {
      x = bf16[64,512]{1,0} parameter(0)
      part = bf16[128,256]{1,0} parameter(1)
      whole = bf16[512,256]{1,0} parameter(2)
      gather = bf16[512,256]{1,0} all-gather(part), dimensions={0}, replica_groups={{0,1,2,3}},
        channel_id=1, use_global_device_ids=true, frontend_attributes={chain_id="0"}
      done = bf16[512,256]{1,0} custom-call(whole, gather), custom_call_target="AsyncCollectiveDone"
      ROOT y = bf16[64,256]{1,0} dot(x, @), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }

    ENTRY main {
      x = bf16[64,512]{1,0} parameter(0)
      part = bf16[128,256]{1,0} parameter(1)
      whole = bf16[512,256]{1,0} parameter(2)
      other = bf16[512,256]{1,0} parameter(3)
      ROOT y = bf16[64,256]{1,0} fusion(x, part, whole, other), kind=kOutput, calls=ends
    }
    """
    other = "other = bf16[512,256]{1,0} parameter(3)\n      gather"
    text = text.replace("gather =", other + " =", 1).replace("@", "done" if reads else "other")
    (cost,) = hlo_cost.costs(hlo_text.module(text, num_partitions=4))
    assert cost.accessed_bytes == 2 * (64 * 512 + 512 * 256 + 64 * 256)


def test_a_copy_without_the_same_buffer_is_read_and_written():
    """A fusion returns its operand as a copy, unless both are declared to be the same buffer."""
    text = """
    passes {
      x = f32[64]{0} parameter(0)
      kept = f32[32]{0} parameter(1)
      y = f32[64]{0} negate(x)
      ROOT both = (f32[64]{0}, f32[32]{0}) tuple(y, kept)
    }

    ENTRY main {
      x = f32[64]{0} parameter(0)
      kept = f32[32]{0} parameter(1)
      ROOT both = (f32[64]{0}, f32[32]{0}) fusion(x, kept), kind=kLoop, calls=passes@
    }
    """
    sizes = {}
    for alias in ("", ", output_to_operand_aliasing={{1}: (1, {})}"):
        (cost,) = hlo_cost.costs(hlo_text.module(text.replace("@", alias)))
        sizes[bool(alias)] = cost.accessed_bytes
    assert sizes == {False: 4 * (2 * 64 + 2 * 32), True: 4 * 2 * 64}


def test_an_update_in_place_is_written_although_its_buffer_is_passed_on():
    text = """
    updates {
      stack = f32[9,64]{1,0} parameter(0)
      row = f32[1,64]{1,0} parameter(1)
      i = s32[] parameter(2)
      zero = s32[] constant(0)
      ROOT new = f32[9,64]{1,0} dynamic-update-slice(stack, row, i, zero)
    }

    ENTRY main {
      stack = f32[9,64]{1,0} parameter(0)
      row = f32[1,64]{1,0} parameter(1)
      i = s32[] parameter(2)
      ROOT new = f32[9,64]{1,0} fusion(stack, row, i), kind=kLoop, calls=updates,
        output_to_operand_aliasing={{}: (0, {})}
    }
    """
    (cost,) = hlo_cost.costs(hlo_text.module(text))
    assert cost.accessed_bytes == 4 * (64 + 64 + 1)


# --- Memories on a chip ---

# S(1) is the vector memory of a core, and S(3) the common memory of a v4 chip. A slice of stacked
# weights and a bias are copied there while other work runs.
_PREFETCHED = """
sliced {
  stack = f32[6,256,128]{2,1,0:T(8,128)} parameter(0)
  ROOT w = f32[1,256,128]{2,1,0:T(8,128)S(1)} slice(stack), slice={[2:3], [0:256], [0:128]}
}

multiplied {
  x = f32[512,256]{1,0:T(8,128)} parameter(0)
  w = f32[1,256,128]{2,1,0:T(8,128)S(1)} parameter(1)
  w.1 = f32[256,128]{1,0:T(8,128)} bitcast(w)
  ROOT y = f32[512,128]{1,0:T(8,128)S(1)} dot(x, w.1), lhs_contracting_dims={1},
    rhs_contracting_dims={0}
}

ENTRY main {
  x = f32[512,256]{1,0:T(8,128)} parameter(0)
  stack = f32[6,256,128]{2,1,0:T(8,128)} parameter(1)
  b = f32[512,128]{1,0:T(8,128)} parameter(2)
  slice-start = ((f32[6,256,128]{2,1,0:T(8,128)}), f32[1,256,128]{2,1,0:T(8,128)S(1)}, s32[]{:S(2)})
    async-start(stack), calls=sliced
  copy-start = (f32[512,128]{1,0:T(8,128)S(1)}, f32[512,128]{1,0:T(8,128)}, u32[]{:S(2)})
    copy-start(b)
  w = f32[1,256,128]{2,1,0:T(8,128)S(1)} async-done(slice-start), calls=sliced
  y = f32[512,128]{1,0:T(8,128)S(1)} fusion(x, w), kind=kOutput, calls=multiplied
  bias = f32[512,128]{1,0:T(8,128)S(1)} copy-done(copy-start)
  ROOT sum = f32[512,128]{1,0:T(8,128)} add(y, bias)
}
"""


@pytest.mark.parametrize("space", ["S(1)", "S(3)"])
def test_only_the_devices_memory_is_counted(space):
    costs = hlo_cost.costs(hlo_text.module(_PREFETCHED.replace("S(1)", space)))
    found = {cost.opcode: cost.accessed_bytes for cost in costs}
    assert found == {
        "slice-start": 4 * 256 * 128,  # It reads the stack, and writes to the core.
        "copy-start": 4 * 512 * 128,
        "fusion": 4 * 512 * 256,  # It reads only x.
        "add": 4 * 512 * 128,  # It writes only its result.
    }


def test_memory_space_1_of_a_gpu_is_its_own_memory():
    """On GPUs, it is the memory for collectives, and its layouts lack tiles."""
    text = """
    ENTRY main {
      x = f32[64]{0} parameter(0)
      y = f32[64]{0:S(1)} negate(x)
      ROOT z = f32[64]{0} negate(y)
    }
    """
    costs = hlo_cost.costs(hlo_text.module(text))
    assert [cost.accessed_bytes for cost in costs] == [4 * 2 * 64] * 2


# --- Permutes ---

# The loop of a product in two directions: one part of the weights is sent to the next partition and
# another part to the previous, while the two parts that arrived before are multiplied.
_BOTH_WAYS = """
ENTRY main {
  up = bf16[256,512]{1,0} parameter(0)
  down = bf16[256,512]{1,0} parameter(1)
  x = bf16[128,256]{1,0} parameter(2)
  up-start = (bf16[256,512]{1,0}, bf16[256,512]{1,0}, u32[], u32[]) collective-permute-start(up),
    channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  down-start = (bf16[256,512]{1,0}, bf16[256,512]{1,0}, u32[], u32[])
    collective-permute-start(down), channel_id=2, source_target_pairs={@}
  y = bf16[128,512]{1,0} dot(x, up), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  up-done = bf16[256,512]{1,0} collective-permute-done(up-start)
  z = bf16[128,512]{1,0} dot(x, down), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  down-done = bf16[256,512]{1,0} collective-permute-done(down-start)
  ROOT all = (bf16[256,512]{1,0}, bf16[256,512]{1,0}, bf16[128,512]{1,0}, bf16[128,512]{1,0})
    tuple(up-done, down-done, y, z)
}
"""
_UP = ((0, 1), (1, 2), (2, 3), (3, 0))


def test_operations_between_start_and_end_run_beside_a_permute():
    text = _BOTH_WAYS.replace("@", "{1,0},{2,1},{3,2},{0,3}")
    up, down = collectives.find(hlo_text.module(text, num_partitions=4))
    assert up == Collective("collective-permute", 2 * 256 * 512, _UP, 1)
    assert up.beside == ("down-start", "y")
    assert down.beside == ("y", "up-done", "z")


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("{1,0},{2,1},{3,2},{0,3}", True),
        ("{0,1},{1,2},{2,3},{3,0}", False),  # Both go in the same direction.
        ("{0,2},{1,3},{2,0},{3,1}", False),
    ],
)
def test_one_of_two_opposite_permutes_is_marked(pairs, expected):
    text = _BOTH_WAYS.replace("@", pairs)
    up, down = collectives.find(hlo_text.module(text, num_partitions=4))
    assert (up.is_beside_reverse, down.is_beside_reverse) == (False, expected)


def test_permutes_one_after_the_other_are_not_together():
    text = """
    ENTRY main {
      x = f32[64]{0} parameter(0)
      up-start = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(x), channel_id=1,
        source_target_pairs={{0,1},{1,2},{2,0}}
      up-done = f32[64]{0} collective-permute-done(up-start)
      down-start = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(up-done),
        channel_id=2, source_target_pairs={{1,0},{2,1},{0,2}}
      ROOT down-done = f32[64]{0} collective-permute-done(down-start)
    }
    """
    found = collectives.find(hlo_text.module(text, num_partitions=3))
    assert [(one.beside, one.is_beside_reverse) for one in found] == [((), False)] * 2


def test_two_partitions_have_one_link_both_ways():
    """A permute between two partitions already uses the link in both directions."""
    text = """
    ENTRY main {
      x = f32[64]{0} parameter(0)
      a = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(x), channel_id=1,
        source_target_pairs={{0,1},{1,0}}
      b = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(x), channel_id=2,
        source_target_pairs={{1,0},{0,1}}
      a-done = f32[64]{0} collective-permute-done(a)
      b-done = f32[64]{0} collective-permute-done(b)
      ROOT sum = f32[64]{0} add(a-done, b-done)
    }
    """
    found = collectives.find(hlo_text.module(text, num_partitions=2))
    assert not any(one.is_beside_reverse for one in found)


# --- Whole programs ---


def test_a_step_on_a_gpu_has_work_beside_its_exchanges_and_one_on_tpu_v3_has_none():
    """The compiler for TPU v3 never splits a collective into a start and an end."""
    for name, is_split in {"gpu_step": True, "tpu_step": False}.items():
        found = collectives.find(programs.kept(name))
        exchanges = [one for one in found if one.kind == "all-to-all"]
        assert exchanges and all(bool(one.beside) == is_split for one in exchanges)


def test_the_buffers_of_a_gather_beside_two_products_are_not_accessed():
    """On TPU v5e: weights are gathered while the fusions of the first product run."""
    module = programs.kept("tpu_beside")
    b, m, h = programs.BESIDE_DIMS
    found = {cost.name: cost for cost in hlo_cost.costs(module)}
    assert found["async-collective-start"].accessed_bytes == 0
    assert found["async-collective-done"].accessed_bytes == 0
    assert sum(cost.flops for cost in found.values()) == 2 * 2 * b * m * h // 16

    # Each of the two fusions reads its factors and at most a sum, and writes a quarter of the rows.
    weights = 2 * (h // 4) * m
    result = 2 * (b // 4) * (h // 4)
    for name in ("fusion.42", "fusion.47"):
        assert result < found[name].accessed_bytes <= 2 * result + 2 * weights
    gathers = [one for one in collectives.find(module) if one.kind == "all-gather"]
    assert [one.result_bytes for one in gathers] == [2 * (h // 4) * m, 2 * (b // 4) * m]
    beside = [[name for name in one.beside if name in found] for one in gathers]
    assert "fusion.42" in beside[0] and "fusion.47" in beside[0] and beside[1] == []


def test_the_rings_of_two_products_go_both_ways_at_once():
    found = collectives.find(programs.kept("tpu_beside"))
    permutes = [one for one in found if one.kind == "collective-permute"]
    assert len(permutes) == 8
    assert sum(one.is_beside_reverse for one in permutes) == 3
