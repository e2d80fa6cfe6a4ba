"""How alike the languages of a family use a run's experts.

    gshard train --mode=eval --logdir=RUN      # writes the load of each expert by language
    python -m repro.quality.family_load --logdir=RUN

For each family with two languages or more: the mean correlation of two of its languages' loads, and
of one of its languages with one of another family. A language's load is a vector of all experts in
all layers of a stack. The families are in repro/recipes/m4bible.tsv.
"""

import pathlib

import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.runs import expert_load
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines
from repro.quality import correlations
from repro.recipes import m4bible_languages
from xla_spmd.files import table

_LOGDIR = flags.DEFINE_string("logdir", None, "The run.", required=True)
_STACK = flags.DEFINE_enum("stack", "encoder", ["encoder", "decoder"], "The stack.")


def main() -> None:
    families = {language.code: language.family for language in m4bible_languages.load()}
    path = pathlib.Path(_LOGDIR.value, EVAL_METRICS)
    evaluations = list(read_lines(path))
    codes = expert_load.evaluated_languages(evaluations)
    unknown = [code for code in codes if code not in families]
    if unknown:
        raise ValueError(f"{path}: the families of {', '.join(unknown)} are unknown.")

    layers = expert_load.by_language(evaluations, codes)
    own = [loads for layer, loads in layers.items() if layer.startswith(_STACK.value)]
    if not own:
        raise ValueError(f"{path}: no language has loads of the {_STACK.value}.")
    loads = {code: np.concatenate([loads[code] for loads in own]) for code in codes}
    print(table.markdown(correlations.rows(loads, families)))


if __name__ == "__main__":
    cli.run("family_load", main)
