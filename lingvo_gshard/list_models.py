"""Lists the registered experiments, also of installed packages and of --import.

gshard models
gshard models nllb
"""

import inspect

from absl import flags

from lingvo_gshard import cli, registry

cli.define_imports()
flags.adopt_module_key_flags(cli)


def main(word: str = "") -> None:
    """Prints the models that have a word, each with the first line of its description."""
    lines = []
    for name in registry.registered_names():
        description = (inspect.getdoc(registry.get_class(name)) or "").partition("\n")[0]
        if word.lower() in f"{name} {description}".lower():
            lines.append((name, description))
    if not lines:
        raise ValueError(f"no model has {word!r} in its name or description; leave it out for all.")

    width = max(len(name) for name, _ in lines)
    for name, description in lines:
        print(f"{name.ljust(width)}  {description}")


if __name__ == "__main__":
    cli.run("models", main, ["[WORD]"])
