"""Planning for machines not at hand: memory, roofline, search, and the tables of the paper.

Read from the bottom up: `request` says what is planned and `plan` what a plan holds. `estimate`
predicts a training step by arithmetic alone, and `compiled` reads what XLA's compilers made of a
program. `published` has steps that others measured, which turn a bound into an expected time.
`kept_plans` makes a plan and keeps it in a folder, and `plan_text` and `plan_pictures` show it. On
these stand the tables of several plans in `tables`, and `commands` for the binary. `any_program`
plans programs that others wrote, from what `compiled` reads of them, and `program_text` shows it:

from lingvo_gshard import planning

plan = planning.of(jitted, args, "v5p:4x4x4")
print(planning.text(plan))

`foreign_search` tries other splits of their arguments:

found = planning.search(jitted, args, "v5p:4x4x4")
print(planning.search_text(found))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lingvo_gshard.planning.any_program import of as of
    from lingvo_gshard.planning.foreign_search import search as search
    from lingvo_gshard.planning.foreign_search_text import search_text as search_text
    from lingvo_gshard.planning.program_text import text as text

# Imported when they are first used, since most modules of the room need no JAX.
_MODULES = {
    "of": "any_program",
    "text": "program_text",
    "search": "foreign_search",
    "search_text": "foreign_search_text",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
