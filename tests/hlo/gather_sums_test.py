"""All-gathers in the shape of all-reduces, in texts by hand."""

import pytest

from lingvo_gshard.hlo import gather_sums, hlo_text

_FUSED = """%fused (p: f32[4,64], q: f32[4,1], r: u32[]) -> f32[4,64] {
  %p = f32[4,64]{1,0} parameter(0)
  %q = f32[4,1]{1,0} parameter(1)
  %zero = u32[] constant(0)
  %r = u32[] parameter(2)
  ROOT %written = f32[4,64]{1,0} dynamic-update-slice(%p, %q, %zero, %r)
}
"""
_HEAD = """ENTRY %main (part: f32[4,1], whole: f32[4,64]) -> f32[4,64] {
  %part = f32[4,1]{1,0} parameter(0)
  %whole = f32[4,64]{1,0} parameter(1)
  %id = u32[] partition-id()
  %seven = u32[] constant(7)
  %nothing = f32[] constant(0)
  %empty = f32[4,64]{1,0} broadcast(%nothing), dimensions={}
"""


def _find(*instructions):
    text = "\n".join(["HloModule m, num_partitions=64", _FUSED + _HEAD, *instructions, "}"])
    return gather_sums.find(hlo_text.parse(text))


def _reduced(*operands):
    return f"  ROOT %sum = f32[4,64]{{1,0}} all-reduce({', '.join(operands)}), channel_id=1"


def _fusion(base, place, name="made"):
    return (
        f"  %{name} = f32[4,64]{{1,0}} fusion(%{base}, %part, %{place}), kind=kLoop, calls=%fused"
    )


def test_a_part_at_the_partitions_place_among_zeros_is_gathered():
    assert _find(_fusion("empty", "id"), _reduced("%made")) == {"sum": 4 * 4 * 64}


def test_its_form_may_change_on_the_way():
    narrow = "  %narrow = bf16[4,64]{1,0} convert(%made)"
    assert _find(_fusion("empty", "id"), narrow, _reduced("%narrow")) == {"sum": 2 * 4 * 64}


def test_of_several_that_were_joined_those_that_gather_count():
    both = [_fusion("empty", "id"), _fusion("empty", "seven", "other")]
    assert _find(*both, _reduced("%made", "%whole", "%other")) == {"sum": 4 * 4 * 64}


def test_an_element_of_a_tuple_is_followed():
    tuple_ = "  %t = (f32[4,64], f32[4,64]) tuple(%whole, %made)"
    element = "  %e = f32[4,64]{1,0} get-tuple-element(%t), index="
    assert _find(_fusion("empty", "id"), tuple_, element + "1", _reduced("%e"))
    assert not _find(_fusion("empty", "id"), tuple_, element + "0", _reduced("%e"))


@pytest.mark.parametrize(("base", "place"), [("whole", "id"), ("empty", "seven")])
def test_sums_of_what_all_have_are_not_gathered(base, place):
    assert _find(_fusion(base, place), _reduced("%made")) == {}
    assert _find(_reduced("%whole")) == {}
