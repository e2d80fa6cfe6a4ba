"""Plans of any XLA program for machines that are not at hand: memory, roofline, expected time.

    import xla_plan

    plan = xla_plan.plan(jitted, args, "v5p:4x4x4")
    print(xla_plan.text(plan))

A search tries other ways to split the program's arguments:

    found = xla_plan.search(jitted, args, "v5p:4x4x4")
    print(xla_plan.search_text(found))

README.md in this folder describes the rooms.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_plan.plans import programs
    from xla_plan.plans.program_text import text as text
    from xla_plan.searches.search import search as search
    from xla_plan.searches.search_text import search_text as search_text

    plan = programs.of

# The home of each name, which is imported when the name is first used: most modules need no JAX.
_HOMES = {
    "plan": ("plans.programs", "of"),
    "text": ("plans.program_text", "text"),
    "search": ("searches.search", "search"),
    "search_text": ("searches.search_text", "search_text"),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)
