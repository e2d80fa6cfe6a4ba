"""The settings of a training run, `train` in the Params of an experiment, and the folder for them.

model_dir/params.txt   the Params of the model whose checkpoints it holds
model_dir/train.lock   locked by the process that trains in it, which deletes it
"""

import contextlib
import importlib.util
import pathlib
from collections.abc import Iterator

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import REQUIRED, Params
from lingvo_gshard.files import atomic_file, lock
from lingvo_gshard.train.hooks import NonFinite

_PARAMS = "params.txt"
_LOCK = "train.lock"
# Settings that may differ between runs of one model, by the ends of their paths.
_IGNORED = (
    ".stages",  # Of a pipeline: where layers are computed, not what.
    ".microbatches",  # How a batch is divided for the pipeline.
    ".product_dtype",  # How products are rounded: the machine decides if it is `auto`.
)

# The packages of train.writers by their names there.
_WRITERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def train_params() -> Params:
    """Returns the settings `params.train`.

    None disables an optional one; with eval_batches=None, all batches are evaluated.
    """
    p = Params()
    p.Define("max_steps", REQUIRED, "The step at which training ends.")
    p.Define("iterations_per_loop", 100, "K, training steps in one call of the device program.")
    scatter = "Whether gradients are summed only where the optimizer's lowercase letters put them."
    p.Define("scatter_gradients", True, scatter)
    accumulation = "N, the parts of a batch that are computed one after the other, for memory."
    p.Define("gradient_accumulation_steps", 1, accumulation)
    ema = "d, the decay of a moving average of the weights, which is evaluated in their place."
    p.Define("ema_decay", None, ema, optional=float)
    p.Define("on_nonfinite", NonFinite.STOP, "STOP or SKIP when a loss or gradient is not finite.")
    p.Define("seed", 1, "The seed of the initial weights, of dropout and of random routing.")

    # When to save, and which checkpoints stay.
    p.Define("save_checkpoints_steps", 1000, "Save after a call that reaches a multiple of this.")
    p.Define("save_checkpoints_secs", None, "Save also after this many seconds.", optional=float)
    p.Define("keep_checkpoint_max", 5, "The number of newest checkpoints to keep.")
    p.Define("keep_checkpoint_every_n_hours", None, "Keep also one every N hours.", optional=float)
    best = "Keep also the checkpoint with the lowest value of this dev metric."
    p.Define("keep_best_by", "nll", best, optional=str)
    p.Define("eval_batches", 100, "Batches of an evaluation during training.", optional=int)

    # When to end before max_steps, in --mode=train_and_eval; see train/early_stopping.py.
    patience = "Evaluations in a row without a better keep_best_by, after which training ends."
    p.Define("early_stop_patience", None, patience, optional=int)
    p.Define("early_stop_min_gain", 0.0, "Better is by more than this.")

    # Where metrics go; see train/writers.py.
    p.Define("writers", "tensorboard", f"Any of {', '.join(_WRITERS)}, with commas between them.")

    # What to start from; see checkpoints/warm_start.py.
    p.Define("warm_start_from", None, "A run's folder, exported file or index.", optional=str)
    rules = "Pairs (pattern of a weight's path, rule); the first pattern that matches applies."
    p.Define("warm_start_rules", ((r"theta\..*", "SAME"),), rules)
    pieces = "Pairs (new piece, old ones with spaces), at whose mean BY_PIECE starts the new one."
    p.Define("warm_start_pieces", (), pieces)
    frozen = "The weights that stay as they are: a pattern of whole paths, as in warm_start_rules."
    p.Define("frozen", None, frozen, optional=str)
    return p


def check(p: Params) -> None:
    """Raises ValueError, which names the setting, if one of `train_params` is out of range."""
    for name in (
        "iterations_per_loop",
        "gradient_accumulation_steps",
        "save_checkpoints_steps",
        "keep_checkpoint_max",
        "max_steps",
    ):
        # max_steps may still be missing: `train` can be given a number of steps instead.
        count = p.Get(name)
        if count is not REQUIRED and count < 1:
            raise ValueError(f"train.{name} must be 1 or more, got {count}.")

    for name in ("save_checkpoints_secs", "keep_checkpoint_every_n_hours"):
        duration = p.Get(name)
        if duration is not None and duration <= 0:
            raise ValueError(f"train.{name} must be more than 0, got {duration}.")

    if p.eval_batches is not None and p.eval_batches < 1:
        raise ValueError(f"train.eval_batches must be 1 or more, or None, got {p.eval_batches}.")
    if p.ema_decay is not None and not 0 <= p.ema_decay < 1:
        raise ValueError(f"train.ema_decay must be in [0, 1), or None, got {p.ema_decay}.")
    if p.early_stop_patience is not None and p.early_stop_patience < 1:
        raise ValueError(
            f"train.early_stop_patience must be 1 or more, or None, got {p.early_stop_patience}."
        )
    if p.early_stop_min_gain < 0:
        raise ValueError(
            f"train.early_stop_min_gain must be 0 or more, got {p.early_stop_min_gain}."
        )
    _check_writers(p)
    if not 0 <= p.seed < 2**31:
        raise ValueError(f"train.seed must be from 0 to 2**31 - 1, got {p.seed}.")


def writers(p: Params) -> list[str]:
    """Returns the names in train.writers."""
    return [name.strip() for name in p.writers.split(",") if name.strip()]


def _check_writers(p: Params) -> None:
    """Raises ValueError for a writer that is unknown, or whose package is not installed."""
    for name in writers(p):
        if name not in _WRITERS:
            raise ValueError(
                f"train.writers={p.writers}: {name!r} is none of {', '.join(_WRITERS)}."
            )
        package = _WRITERS[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"train.writers={p.writers}: the package {package} is not installed: pip install "
                f"{package}."
            )


@contextlib.contextmanager
def claimed(
    model_dir: str | pathlib.Path,
    text: str,
    model_prefixes: tuple[str, ...],
    defaults: str = "",
) -> Iterator[None]:
    """Locks a folder, and writes `text`, its Params.ToText(), to params.txt.

    Raises ValueError as `check_folder`, or if another process has locked the folder.
    """
    check_folder(model_dir, text, model_prefixes, defaults)
    folder = pathlib.Path(model_dir)
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

    Settings in `text`, a Params.ToText(), must agree with those of params.txt if they are under one
    of the dotted paths `model_prefixes`; others may change between runs. Without prefixes, all must
    agree but those under `train`. A setting that params.txt lacks was added since; its default, in
    the Params.DefaultsText() `defaults`, means what was done before.
    """
    path = pathlib.Path(model_dir) / _PARAMS
    if not path.exists():
        return
    try:
        lines = hyperparams.differences(text, path.read_text(encoding="utf-8"), defaults)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error

    # A line is `PATH: VALUE, not VALUE`.
    differing = []
    for line in lines:
        setting, _, _ = line.partition(":")
        if _must_agree(setting, model_prefixes):
            differing.append(line)
    if differing:
        problem = f"{path}: this folder holds another model; choose another one"
        raise ValueError(f"{problem}. It differs in {'; '.join(differing)}.")


def _must_agree(setting: str, prefixes: tuple[str, ...]) -> bool:
    """Returns whether the setting at a dotted path is one of the model, as in `check_folder`."""
    if setting.endswith(_IGNORED):
        return False
    if not prefixes:
        return not setting.startswith("train.")
    # With a dot at the end, `task` is a prefix of `task.dim`, but not of `tasks.dim`.
    return f"{setting}.".startswith(tuple(f"{prefix}." for prefix in prefixes))
