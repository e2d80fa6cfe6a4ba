"""Imports every module of a package, where only the packages that it may import exist."""

import importlib
import pathlib
import sys


def main(package: str) -> None:
    """Imports the modules. Raises ImportError if one imports a module that does not exist."""
    folder = pathlib.Path(importlib.import_module(package).__path__[0])
    modules = sorted(path for path in folder.rglob("*.py") if path.name != "__main__.py")
    assert modules, f"{folder} has no modules"
    for path in modules:
        names = path.relative_to(folder).with_suffix("").parts
        importlib.import_module(".".join((package, *names)).removesuffix(".__init__"))
    print(f"{package}: {len(modules)} modules")


if __name__ == "__main__":
    main(sys.argv[1])
