"""The folder of saved executables, which is checked before JAX is imported."""

import pathlib


def check(folder: pathlib.Path) -> None:
    """Raises ValueError if a folder contains no saved executable."""
    if not any(folder.glob("*.json")):
        raise ValueError(f"{folder}: no saved executables there; `plan model --save` writes them.")
