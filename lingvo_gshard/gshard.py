"""One command for all programs: `gshard NAME FLAGS` is `python -m MODULE FLAGS`.

gshard prepare --input=CORPUS --out=DATA
gshard train --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN
gshard translate --logdir=RUN < in.txt > out.txt
gshard generate --logdir=RUN --temperature=0.8 < prompts.txt
"""

import runpy
import sys

from lingvo_gshard.spmd import versions

# Each is a program of its own, with its own flags: `python -m MODULE --help` lists them.
_PROGRAMS = {
    "prepare": "data_prep.build",
    "train": "lingvo_gshard.trainer",
    "translate": "lingvo_gshard.translate",
    "generate": "lingvo_gshard.generate",
    "import": "lingvo_gshard.import_model",
    "prune": "lingvo_gshard.prune",
    "export": "lingvo_gshard.export_bundle",
    "serve": "lingvo_gshard.serve",
    "compare": "lingvo_gshard.compare",
    "plan": "lingvo_gshard.plan",
}


def run() -> None:
    """Runs the program that the first argument names, with the others as its flags."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("", "-h", "--help", "help"):
        print(_usage())
        return
    if name not in _PROGRAMS:
        sys.exit(f"gshard: no program {name!r}; expected one of {', '.join(_PROGRAMS)}.")

    # The program sees its own flags alone.
    del sys.argv[1]
    try:
        runpy.run_module(_PROGRAMS[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        # What the program imports at its top; cli.run reports the rest.
        advice = versions.advice(error)
        if advice is None:
            raise
        sys.exit(f"gshard {name}: {advice}")


def _usage() -> str:
    """Returns the names of all programs, and the module that each one is."""
    lines = ["usage: gshard PROGRAM FLAGS; gshard PROGRAM --help lists a program's flags.", ""]
    for name, module in _PROGRAMS.items():
        lines.append(f"  gshard {name:<10} python -m {module}")
    return "\n".join(lines)


if __name__ == "__main__":
    run()
