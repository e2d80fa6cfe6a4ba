"""Imports every module of a room of the library, where only what the room may import exists."""

import importlib
import pathlib
import sys

_LIBRARY = "lingvo_gshard"


def main(room: str) -> None:
    """Imports the modules; raises ImportError for what does not exist."""
    folder = pathlib.Path(importlib.import_module(f"{_LIBRARY}.{room}").__path__[0])
    modules = sorted(folder.rglob("*.py"))
    assert modules, f"{folder} has no modules"
    for path in modules:
        names = path.relative_to(folder).with_suffix("").parts
        importlib.import_module(".".join((_LIBRARY, room, *names)).removesuffix(".__init__"))
    print(f"{room}: {len(modules)} modules")


if __name__ == "__main__":
    main(sys.argv[1])
