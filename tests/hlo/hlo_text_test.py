"""XLA's text read into records."""

import pytest

from lingvo_gshard.hlo import hlo_text
from lingvo_gshard.hlo.hlo_text import Instruction

_TEXT = """HloModule jit_call, is_scheduled=true, num_partitions=8, frontend_attributes={x="num_partitions=3"}

FileNames
1 "main.py"

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(256)} parameter(0)
  %y = f32[]{:T(256)} parameter(1)
  ROOT %sum = f32[]{:T(256)} add(%x, %y), metadata={op_name="a/b;c(d)/to_apply=%no"}
}

ENTRY %main.6_spmd (p: f32[2,64]) -> (f32[2]) {
  %p = f32[2,64]{1,0:T(2,128)} parameter(0), sharding={devices=[8,1]<=[8]}, metadata={op_name="args[1]"}
  %pair = (f32[2,64]{1,0:T(8,128)(2,1)}, /*index=1*/(s32[], pred[])) tuple(%p, %q)
  %r.1-x = f32[2]{0} reduce(%p, /*index=1*/%zero), dimensions={1}, to_apply=%add.1, backend_config={"calls=%no":[]}
  %if = f32[2]{0} conditional(%pair), branch_computations={%one, %two.2}
  ROOT %t = (f32[2]{0}) tuple(%r.1-x)
}
"""  # noqa: E501


def test_every_part_of_an_instruction():
    module = hlo_text.parse(_TEXT)
    assert (module.entry, module.num_partitions) == ("main.6_spmd", 8)
    assert list(module.computations) == ["add.1", "main.6_spmd"]
    added, main = module.computations.values()
    assert (added.root, main.root) == ("sum", "t")
    assert added.instructions["sum"].op_name == "a/b;c(d)/to_apply=%no"
    assert added.instructions["sum"].called == added.instructions["x"].called == ()
    assert main.instructions["r.1-x"] == Instruction(
        "r.1-x",
        "f32[2]{0}",
        "reduce",
        "%p, /*index=1*/%zero",
        "dimensions={1}, to_apply=%add.1",
        'backend_config={"calls=%no":[]}',
    )
    assert main.instructions["r.1-x"].operands == ("p", "zero")
    assert main.instructions["r.1-x"].called == ("add.1",)
    assert main.instructions["r.1-x"].op_name == ""
    assert main.instructions["if"].called == ("one", "two.2")
    assert main.instructions["p"].operands == ()
    pair = main.instructions["pair"].type
    assert pair == "(f32[2,64]{1,0:T(8,128)(2,1)}, /*index=1*/(s32[], pred[]))"
    assert [each.strip() for each in hlo_text.tuple_elements(pair)] == [
        "f32[2,64]{1,0:T(8,128)(2,1)}",
        "/*index=1*/(s32[], pred[])",
    ]


def test_attributes_by_name():
    module = hlo_text.parse(_TEXT)
    reduced = module.computations["main.6_spmd"].instructions["r.1-x"]
    assert reduced.attribute("to_apply") == "add.1"
    with pytest.raises(ValueError, match="reduce r.1-x has no index, but 'dimensions="):
        reduced.attribute("index")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%x = f32[] 17", "no opcode after its type: x = f32"),
        ("%x = (f32[], f32[] tuple(%y)", "A parenthesis is not closed"),
        ("%x = f32[] add(%y, %z", "A parenthesis is not closed"),
    ],
)
def test_what_is_no_instruction_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        hlo_text.parse(f"ENTRY %main (p: f32[]) -> f32[] {{\n  {line}\n}}")
