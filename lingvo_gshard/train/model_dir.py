"""Which model a model_dir belongs to, and which process trains in it.

model_dir/params.txt   the Params of the model whose checkpoints it holds
model_dir/train.lock   locked by the process that trains in it
"""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from lingvo_gshard.core import atomic_file, hyperparams

PARAMS = "params.txt"
_LOCK = "train.lock"
# Settings of earlier versions. Folders may still hold them; they never told models apart.
_REMOVED = (".second_threshold", "_capacity.number")


@contextlib.contextmanager
def claimed(
    model_dir: str | pathlib.Path, text: str, model_prefixes: tuple[str, ...]
) -> Iterator[None]:
    """Locks the folder for a training run and writes params.txt, after `check`.

    The operating system releases the lock when the process ends; child processes don't inherit it.
    Raises ValueError as `check`, or if another process trains in the folder.
    """
    check(model_dir, text, model_prefixes)
    folder = pathlib.Path(model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another process trains in this folder; wait for it, or choose another."
            ) from None
        atomic_file.write(folder / PARAMS, text)
        yield


def check(model_dir: str | pathlib.Path, text: str, model_prefixes: tuple[str, ...]) -> None:
    """Checks that model_dir, which may not exist yet, holds this model or none.

    Entries of `text`, its Params.ToText(), must agree under the dotted paths `model_prefixes`; all
    others may change between runs. If there are no prefixes, all must agree but those under
    `train`. Raises ValueError, which lists the differences, if it holds another model.
    """
    path = pathlib.Path(model_dir) / PARAMS
    if not path.exists():
        return
    differing = hyperparams.differences(
        _entries(text, model_prefixes), _entries(path.read_text(), model_prefixes)
    )
    if differing:
        raise ValueError(
            f"{path}: this folder holds another model; choose another model_dir. It differs in "
            f"{'; '.join(differing)}."
        )


def _entries(text: str, prefixes: tuple[str, ...]) -> str:
    def counts(line: str) -> bool:
        path = line.split(" : ", 1)[0]
        if path.endswith(_REMOVED):
            return False
        if not prefixes:
            return not path.startswith("train.")
        return any(f"{path}.".startswith(prefix + ".") for prefix in prefixes)

    return "".join(line for line in text.splitlines(keepends=True) if counts(line))
