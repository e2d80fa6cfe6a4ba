"""The flags that name an experiment and change its settings, for the programs that take both."""

import pathlib

from absl import flags

from lingvo_gshard import cli, registry
from lingvo_gshard.core import settings

MODEL = flags.DEFINE_string(
    "model",
    None,
    "An experiment: a registered one, such as toy.MoE8E4L, or a path, my_package.my_module.Class.",
)
SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
CONFIG = flags.DEFINE_string(
    "config",
    None,
    "A TOML file of settings, and perhaps the model, as `gshard settings MODEL --toml` writes one; "
    "--model and --set override it.",
)
cli.define_imports()
flags.adopt_module_key_flags(cli)


def read_config() -> None:
    """Adds the model and the settings of --config to --model and --set, which win.

    Raises ValueError, which names the file, if it does not exist, is not TOML, or has a setting
    that the model refuses.
    """
    if CONFIG.value is None:
        return
    model, changes = settings.from_toml(pathlib.Path(CONFIG.value))
    if MODEL.value is None and model is not None:
        flags.FLAGS[MODEL.name].value = model
    if MODEL.value is not None:
        registry.get_class(MODEL.value)
        try:
            registry.get_params(MODEL.value, changes)
        except ValueError as error:
            problem = str(error).removeprefix("--set=")
            raise ValueError(f"--config={CONFIG.value}: {problem}") from error

    # The last of several values of a setting counts.
    flags.FLAGS[SET.name].value = [*changes, *SET.value]
    flags.FLAGS[CONFIG.name].value = None  # Another call adds nothing.
