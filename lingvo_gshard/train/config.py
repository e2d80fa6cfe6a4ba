"""The settings of a training run: `train` in the Params of an experiment."""

from lingvo_gshard.core.hyperparams import REQUIRED, Params
from lingvo_gshard.train.hooks import NonFinite


def train_params() -> Params:
    """Returns the settings that TPUEstimator and the trainer read from `params.train`."""
    p = Params()
    p.Define("max_steps", REQUIRED, "The step at which training ends.")
    p.Define("iterations_per_loop", 100, "K, training steps in one call of the device program.")
    p.Define("save_checkpoints_steps", 1000, "Save at every multiple of this many steps.")
    p.Define(
        "save_checkpoints_secs",
        None,
        "Also save this many seconds after the last checkpoint; None disables it.",
        optional=float,
    )
    p.Define("keep_checkpoint_max", 5, "The number of newest checkpoints to keep.")
    p.Define(
        "keep_checkpoint_every_n_hours",
        None,
        "Also keep one checkpoint every N hours; None disables it.",
        optional=float,
    )
    p.Define(
        "keep_best_by",
        "nll",
        "Also keep the checkpoint with the lowest value of this dev metric; None disables it.",
        optional=str,
    )
    p.Define("on_nonfinite", NonFinite.STOP, "STOP or SKIP when a loss or gradient is not finite.")
    p.Define(
        "warm_start_from",
        None,
        "A run's folder or a .safetensors file to take initial weights from; None disables it.",
        optional=str,
    )
    p.Define(
        "warm_start_rules",
        ((r"theta\..*", "SAME"),),
        "Pairs (pattern of a weight's path, rule); the first pattern that matches applies.",
    )
    p.Define(
        "eval_batches", 100, "Batches of an evaluation during training; None for all.", optional=int
    )
    p.Define("seed", 1, "The seed of the initial weights, of dropout and of random routing.")
    return p


def check(p: Params) -> None:
    """Raises ValueError, which names the setting, if one of `train_params` is out of range."""
    for name in ("iterations_per_loop", "save_checkpoints_steps", "keep_checkpoint_max"):
        if p.Get(name) < 1:
            raise ValueError(f"train.{name} must be 1 or more, got {p.Get(name)}.")
    for name in ("save_checkpoints_secs", "keep_checkpoint_every_n_hours"):
        if p.Get(name) is not None and p.Get(name) <= 0:
            raise ValueError(f"train.{name} must be more than 0, got {p.Get(name)}.")
    if not 0 <= p.seed < 2**31:
        raise ValueError(f"train.seed must be from 0 to 2**31 - 1, got {p.seed}.")
