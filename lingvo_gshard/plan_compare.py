"""Prints plans side by side, of experiments and of any programs.

gshard plan compare PLAN_A PLAN_B
"""

from lingvo_gshard import cli
from xla_spmd.files import storage


def main(*folders: str) -> None:
    """Prints the plans in two or more folders side by side."""
    if len(folders) < 2:
        raise ValueError(f"expected the folders of two or more plans, got {len(folders)}.")
    from lingvo_gshard.plans import plan

    plans = [plan.load_any(storage.path(folder)) for folder in folders]

    # A folder without a plan has been reported by now, without waiting for what this imports.
    from lingvo_gshard.plans import plan_text

    print(plan_text.comparison(plans), flush=True)


if __name__ == "__main__":
    cli.run("plan compare", main, ["PLAN", "PLAN..."])
