"""The settings of a training run, `train` in an experiment's Params, and the folder of a model.

model_dir/params.txt   the Params of the model whose checkpoints are in the folder
model_dir/train.lock   locked, and finally deleted, by the process that trains there
"""

import contextlib
import importlib.util
import pathlib
from collections.abc import Iterator

from lingvo_gshard.core import hyperparams, settings
from lingvo_gshard.core.hyperparams import REQUIRED, BaseParams, setting
from lingvo_gshard.train.hooks import NonFinite
from xla_spmd.files import atomic_file, lock

_PARAMS = "params.txt"
_LOCK = "train.lock"
_TOLD_DIFFERENCES = 3  # The most settings that a message about another model names.
# Settings that may differ between runs of one model: the ends of their paths.
_IGNORED = (
    ".stages",  # A pipeline's stages: where layers are computed, not which.
    ".microbatches",  # How a batch is divided for the pipeline.
    ".remat",  # What a gradient computes again: AUTO leaves it to the machine.
    ".product_dtype",  # How products are rounded: `auto` leaves it to the machine.
)

_WRITERS = ("tensorboard", "wandb", "mlflow")  # Each has the name of its package.


class TrainParams(BaseParams):
    """The settings `params.train`.

    None disables an optional setting; eval_batches=None evaluates all batches.
    """

    max_steps: int = setting(REQUIRED, "The step at which training ends.")
    iterations_per_loop: int = setting(100, "K, training steps in one call of the device program.")
    scatter_gradients: bool = setting(
        True,
        "Whether to sum gradients only where the optimizer's lowercase letters put them.",
    )
    gradient_accumulation_steps: int = setting(
        1, "N, the parts of a batch that are computed one after another, to save memory."
    )
    ema_decay: float | None = setting(
        None,
        "d, the decay of the weights' moving average, which is evaluated in their place.",
    )
    on_nonfinite: NonFinite = setting(
        NonFinite.STOP, "STOP or SKIP when a loss or gradient is not finite."
    )
    seed: int = setting(1, "The seed of the initial weights, of dropout and of random routing.")

    # When to save, and which checkpoints stay.
    save_checkpoints_steps: int = setting(
        1000, "Save after a call that reaches a multiple of this."
    )
    save_checkpoints_secs: float | None = setting(None, "Save also after this many seconds.")
    keep_checkpoint_max: int | None = setting(
        5, "The number of newest checkpoints to keep; None keeps all."
    )
    keep_checkpoint_every_n_hours: float | None = setting(None, "Keep also one every N hours.")
    keep_best_by: str | None = setting(
        "nll", "Keep also the checkpoint with the lowest value of this dev metric."
    )
    eval_batches: int | None = setting(100, "Batches of an evaluation during training.")

    # When to end before max_steps, in --mode=train_and_eval; see train/early_stopping.py.
    early_stop_patience: int | None = setting(
        None,
        "Evaluations in a row without a better keep_best_by, after which training ends.",
    )
    early_stop_min_gain: float = setting(0.0, "Only a larger gain counts as better.")

    # Where metrics go; see train/writers.py.
    writers: str = setting(
        "tensorboard", f"Any of {', '.join(_WRITERS)}, with commas between them."
    )

    # The initial weights; see checkpoints/warm_start.py.
    warm_start_from: str | None = setting(None, "A run's folder, exported file or index.")
    warm_start_rules: tuple[tuple[str, str], ...] = setting(
        ((r"theta\..*", "SAME"),),
        "Pairs (pattern of a weight's path, rule); the first pattern that matches applies.",
    )
    warm_start_pieces: tuple[tuple[str, str], ...] = setting(
        (), "Pairs (new piece, old pieces with spaces): BY_PIECE starts new ones at the mean."
    )
    frozen: str | None = setting(
        None,
        "The weights that stay unchanged: a pattern of whole paths, as in warm_start_rules.",
    )


def train_params() -> TrainParams:
    """Returns the settings `params.train`."""
    return TrainParams()


def check(p: TrainParams) -> None:
    """Raises ValueError, which names the setting, if one of `train_params` is out of range."""
    for name, value in p.Leaves():
        _check(p, name, hyperparams.is_finite(value), "finite")

    for name in (
        "iterations_per_loop",
        "gradient_accumulation_steps",
        "save_checkpoints_steps",
        "max_steps",
    ):
        # max_steps may still be missing: `train` can take a number of steps instead.
        count = p.Get(name)
        _check(p, name, count is REQUIRED or count >= 1, "1 or more")

    for name in ("save_checkpoints_secs", "keep_checkpoint_every_n_hours"):
        duration = p.Get(name)
        _check(p, name, duration is None or duration > 0, "more than 0")

    for name in ("keep_checkpoint_max", "eval_batches", "early_stop_patience"):
        count = p.Get(name)
        _check(p, name, count is None or count >= 1, "1 or more, or None")

    is_decay = p.ema_decay is None or 0 <= p.ema_decay < 1
    _check(p, "ema_decay", is_decay, "in [0, 1), or None")
    _check(p, "early_stop_min_gain", p.early_stop_min_gain >= 0, "0 or more")
    _check(p, "seed", 0 <= p.seed < 2**31, "from 0 to 2**31 - 1")
    _check_writers(p)


def _check(p: TrainParams, name: str, is_right: bool, expected: str) -> None:
    """Raises ValueError, which names the setting and its value, unless `is_right`."""
    if not is_right:
        raise ValueError(f"train.{name} must be {expected}, got {p.Get(name)}.")


def writers(p: TrainParams) -> list[str]:
    """Returns the names in train.writers."""
    return [name.strip() for name in p.writers.split(",") if name.strip()]


def _check_writers(p: TrainParams) -> None:
    """Raises ValueError if a writer is unknown, or its package is not installed."""
    for name in writers(p):
        if name not in _WRITERS:
            raise ValueError(
                f"train.writers={p.writers}: {name!r} is not one of {', '.join(_WRITERS)}."
            )
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"train.writers={p.writers}: the package {name} is not installed: pip install "
                f"{name}."
            )


@contextlib.contextmanager
def claimed(
    model_dir: str | pathlib.Path,
    text: str,
    model_prefixes: tuple[str, ...],
    defaults: str = "",
) -> Iterator[None]:
    """Locks a folder, and writes `text`, its Params.ToText(), to params.txt.

    Raises ValueError if it is a file or another model's folder, or if another process has locked
    it.
    """
    folder = pathlib.Path(model_dir)
    if folder.is_file():
        raise ValueError(f"{model_dir} is a file; a folder is expected.")
    check_folder(model_dir, text, model_prefixes, defaults)
    folder.mkdir(parents=True, exist_ok=True)

    with lock.held(folder, "trains in this folder", folder / _LOCK):
        atomic_file.write(folder / _PARAMS, text)
        yield


def check_folder(
    model_dir: str | pathlib.Path,
    text: str,
    model_prefixes: tuple[str, ...],
    defaults: str = "",
) -> None:
    """Raises ValueError, which lists the differences, if model_dir holds another model.

    Settings in `text`, a Params.ToText(), must agree with params.txt if they are under one of the
    dotted paths `model_prefixes`; others may change between runs. Without prefixes, all settings
    except `train` must agree. A setting that params.txt lacks was added later; its default, in the
    Params.DefaultsText() `defaults`, is taken to mean the former behavior.
    """
    path = pathlib.Path(model_dir) / _PARAMS
    if not path.exists():
        return
    try:
        lines = settings.differences(text, path.read_text(encoding="utf-8"), defaults)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error

    # Each line has the form `PATH: VALUE, not VALUE`.
    differing = []
    for line in lines:
        setting, _, _ = line.partition(":")
        if _must_agree(setting, model_prefixes):
            differing.append(line)
    if differing:
        problem = f"{path}: this folder holds another model; choose another one"
        raise ValueError(f"{problem}. It differs in {_told(differing)}.")


def _told(differing: list[str]) -> str:
    """Returns the first differences, and how many more there are.

    Values that changed come first: a layer that only one model has is many settings.
    """
    absent = (": absent, not ", ", not absent")
    by_kind = sorted(differing, key=lambda line: any(mark in line for mark in absent))
    lines = by_kind[:_TOLD_DIFFERENCES]
    if len(differing) > len(lines):
        lines.append(f"and {len(differing) - len(lines)} more settings")
    return "; ".join(lines)


def _must_agree(setting: str, prefixes: tuple[str, ...]) -> bool:
    """Returns whether the setting at a dotted path belongs to the model; see `check_folder`."""
    if setting.endswith(_IGNORED):
        return False
    if not prefixes:
        return not setting.startswith("train.")
    # With a dot at the end, `task` is a prefix of `task.dim`, but not of `tasks.dim`.
    return f"{setting}.".startswith(tuple(f"{prefix}." for prefix in prefixes))
