"""One command for the planner's programs: `python -m xla_plan NAME FLAGS`."""

from xla_spmd.runtime import dispatch

_PROGRAMS = {
    "program": "xla_plan.plan_program",
    "search": "xla_plan.search_program",
    "calibrate": "xla_plan.calibrate",
}
_CLAUSES = {
    "program": "plans a program from a file of jax.export, StableHLO or HLO",
    "search": "searches for better ways to split such a program",
    "calibrate": "measures one device, for --rates of plans of such devices",
}


def run() -> None:
    """Runs the program that the first argument names."""
    dispatch.run("xla_plan", _PROGRAMS, _CLAUSES, "program")


if __name__ == "__main__":
    run()
