"""A request to prune a run, which is checked before JAX is imported."""

import dataclasses
import pathlib

from lingvo_gshard.checkpoints import saved_steps
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers import moe_sizes
from lingvo_gshard.runs import expert_load, kept_experts
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines


@dataclasses.dataclass(frozen=True)
class Request:
    """How many experts to keep, and for which languages."""

    languages: tuple[str, ...]  # The names that evaluation gives them.
    keep: float  # The share of a layer's experts that remain.
    is_merged: bool = False  # Whether the other experts are merged into these.
    multiple_of: int = 1  # The number of remaining experts is a multiple of it.

    def num_kept(self, model: str, params: Params, logdir: str) -> dict[str, int]:
        """Returns how many experts each layer of a stack keeps, by stack, given a run's settings.

        Raises ValueError for a model without experts, and for a share or multiple out of its range.
        """
        stacks = moe_stacks(params)
        if not stacks:
            raise ValueError(f"{logdir}: {model} has no experts to prune.")
        counts = {}
        for stack, p in stacks.items():
            counts[stack] = kept_experts.num_kept(
                p.moe.num_experts, self.keep, moe_sizes.num_choices(p.moe), self.multiple_of
            )
        return counts

    def loads(self, logdir: str) -> dict[str, dict[str, list[float]]]:
        """Returns {layer: {language: load by expert}} of a run's MoE layers and the languages.

        Raises ValueError for languages on which dev was not evaluated.
        """
        evaluations = read_lines(pathlib.Path(logdir, EVAL_METRICS))
        evaluated = expert_load.evaluated_languages(evaluations)
        if not evaluated:
            raise ValueError(
                f"{logdir} has no loads of experts by language: evaluate it with --mode=eval first."
            )
        missing = [language for language in self.languages if language not in evaluated]
        if missing or not self.languages:
            given = ", ".join(missing) or "none"
            raise ValueError(
                f"languages={','.join(self.languages)}: no loads of {given} in {logdir}; it has "
                f"the loads of {', '.join(evaluated)}."
            )
        return expert_load.by_language(evaluations, self.languages)


def check_new(out: pathlib.Path) -> None:
    """Raises ValueError for a folder that has other files than an interrupted call's."""
    unfinished = saved_steps.partial_folder(out, saved_steps.NEW_RUN)
    if out.exists() and not unfinished.is_dir() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: choose a new folder.")


def moe_stacks(params: Params) -> dict[str, Params]:
    """Returns the settings of the stacks that have experts, by name."""
    stacks = {name: params.task.Get(name) for name in params.task.cls.STACKS}
    return {name: p for name, p in stacks.items() if p.moe is not None}
