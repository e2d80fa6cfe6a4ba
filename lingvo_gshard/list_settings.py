"""Lists the settings of a model, with their values, types and descriptions.

    gshard settings toy.MoE8E4L
    gshard settings toy.MoE8E4L batch
    gshard settings toy.MoE8E4L --toml > my.toml

WORD is a part of a name or of a description. Programs take --set=path=value for one setting, and
--config=my.toml for a file of them. Given here, both change the values that are listed.
"""

from absl import flags

from lingvo_gshard import cli, experiment_flags, registry
from lingvo_gshard.core import settings

_TOML = flags.DEFINE_bool("toml", False, "Write a TOML file of all settings, for --config.")
flags.adopt_module_key_flags(experiment_flags)


def main(model: str | None = None, word: str | None = None) -> None:
    """Prints the settings; raises ValueError for a user's mistake."""
    experiment_flags.read_config()
    model = model or experiment_flags.MODEL.value
    if model is None:
        raise ValueError("give a model: gshard settings MODEL; gshard models lists them.")
    if _TOML.value and word is not None:
        raise ValueError(f"--toml writes all settings: leave {word} out.")

    params = registry.get_params(model, experiment_flags.SET.value)
    if _TOML.value:
        print(settings.to_toml(params, model), end="")
        return
    try:
        found = settings.matching(params, word)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    print(settings.listing(found))


if __name__ == "__main__":
    cli.run("settings", main, ["[MODEL]", "[WORD]"])
