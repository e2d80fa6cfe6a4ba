"""One command for all programs: `gshard NAME FLAGS`.

gshard prepare --input=CORPUS --out=DATA
gshard train --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN
gshard translate --logdir=RUN < in.txt > out.txt
gshard generate --logdir=RUN --temperature=0.8 < prompts.txt
"""

from lingvo_gshard import __version__
from xla_spmd.runtime import dispatch

# In the order of use. Each has its own flags.
_PROGRAMS = {
    "prepare": "data_prep.build",
    "models": "lingvo_gshard.list_models",
    "settings": "lingvo_gshard.list_settings",
    "train": "lingvo_gshard.trainer",
    "translate": "lingvo_gshard.translate",
    "generate": "lingvo_gshard.generate",
    "compare": "lingvo_gshard.compare",
    "export": "lingvo_gshard.export_bundle",
    "serve": "lingvo_gshard.serve",
    "import": "lingvo_gshard.import_model",
    "prune": "lingvo_gshard.prune",
    "plan": "lingvo_gshard.plan_programs",
    "completion": "lingvo_gshard.completion",
}
_CLAUSES = {
    "prepare": "makes training data of text",
    "models": "lists the experiments",
    "settings": "lists a model's settings, and writes a file of them",
    "train": "trains, evaluates and scores a model; continues a run that was stopped",
    "translate": "translates lines of text",
    "generate": "continues prompts with a language model",
    "compare": "compares the scores of runs by language",
    "export": "writes a bundle, a SavedModel, or a model for transformers",
    "serve": "translates or generates over HTTP, with a page to type in",
    "import": "makes a run of a model that transformers wrote",
    "prune": "makes a smaller run, with the experts that some languages use",
    "plan": "computes what a program needs and costs on machines that are not at hand",
    "completion": "prints a script that lets bash and zsh complete programs and flags",
}


def run() -> None:
    """Runs the program that the first argument names, with the others as its flags."""
    dispatch.run("gshard", _PROGRAMS, _CLAUSES, "train", __version__)


if __name__ == "__main__":
    run()
