"""Sets of dims, whose sizes and letters keep them apart."""

from xla_plan.program.dims.dim_sets import DimSets


def test_dims_of_one_size_become_one_and_share_a_letter():
    sets = DimSets()
    a, b, c = (sets.new(size) for size in (4, 4, 4))
    sets.name(c, "H")
    sets.unite(a, b)
    sets.unite(b, c)
    assert sets.count() == 1
    assert sets.find(a) == sets.find(b) == sets.find(c)
    assert sets.letter(a) == sets.letter(b) == "H"


def test_other_sizes_and_other_letters_stay_apart():
    sets = DimSets()
    a, b, c = (sets.new(size) for size in (4, 4, 5))
    sets.name(a, "M")
    sets.name(b, "H")
    sets.unite(a, b)
    sets.unite(b, c)
    assert sets.count() == 3
    assert [sets.letter(dim) for dim in (a, b, c)] == ["M", "H", None]
