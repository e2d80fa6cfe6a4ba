"""Searches for tables that split the arguments of somebody else's program better.

python -m xla_plan search --program=step.export --topology=v5p:4x4x4 --out=SEARCH
"""

import functools

from absl import flags

from xla_plan import program_flags
from xla_plan.plans import plan_folder
from xla_plan.program import patterns
from xla_plan.searches import axes
from xla_spmd.runtime import command_line, environment

_LETTERS = flags.DEFINE_multi_string(
    "letters",
    [],
    "Letters of the arguments' dims, REGEX=LETTERS, such as '.*mlp/wi=M H', where _ is never "
    "split; repeatable. Others are proposed.",
)
_AXES = flags.DEFINE_list(
    "axes",
    None,
    "One or two axes of the meshes that are tried, the batch's first; the program's own by "
    "default, or data,model. --mesh fixes their sizes.",
)
flags.adopt_module_key_flags(program_flags)


def main() -> None:
    """Prints each table after its compilation, then their ranking, and writes them into --out."""
    program = program_flags.program()
    _check_search()

    # All mistakes but the program's own have been reported by now, before JAX is imported.
    environment.prepare_compiling()
    with environment.quiet_stderr():  # JAX 0.10 logs that a driver is missing.
        from xla_plan.plans import own_process
        from xla_plan.plans.programs import Options
        from xla_plan.searches import search

    options = Options(
        mesh=program_flags.MESH.value,
        roles=program_flags.ROLE.value,
        categories=program_flags.CATEGORY.value,
    )
    with plan_folder.working(program_flags.OUT.value or "") as out:
        request = search.Request(
            path=program,
            topology=program_flags.TOPOLOGY.value or "",
            letters=_LETTERS.value,
            axes=_AXES.value or (),
            options=options,
            folder=out,
            progress=functools.partial(print, flush=True),
        )
        # A damaged file can make parsers and compilers die.
        print("\n" + own_process.call(search.save_search, request), flush=True)


def _check_search() -> None:
    """Raises ValueError for malformed --letters, and for --axes or --mesh that no search takes."""
    for text in _LETTERS.value:
        patterns.parse_letters(text)

    names = _AXES.value or ()
    if names:
        axes.check(names)
    if program_flags.MESH.value is not None:
        axes.parse_mesh(program_flags.MESH.value, names, program_flags.num_devices())


def run() -> None:
    """The console entry."""
    command_line.run("plan search_program", main)


if __name__ == "__main__":
    run()
