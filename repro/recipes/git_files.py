"""Files of a commit of a public git repository, fetched one by one.

A commit's name is a digest of all its files, and git checks each file that it receives. So a file
is either the one that was published under this name, or it is refused.
"""

import dataclasses
import os
import pathlib
import subprocess

# Git must not ask for a password, since nobody would answer.
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0"}
_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Repository:
    """A commit of a repository."""

    name: str
    url: str
    commit: str  # 40 hex digits.


class Fetched:
    """A commit's files in a folder, which keeps all fetched files.

    Another process with the same folder continues there. Raises ValueError, in one line, if git is
    missing, or if the commit can't be fetched or has another digest.
    """

    def __init__(self, repository: Repository, folder: pathlib.Path):
        self._repository = repository
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

        # Fetch only the commit and its folders; files are fetched when they are read.
        self._git("init", "--quiet", "--bare")
        self._git("config", "remote.origin.url", repository.url)
        self._git("config", "remote.origin.promisor", "true")
        self._git("config", "remote.origin.partialclonefilter", "blob:none")
        self._git(
            "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", repository.commit
        )

    def read(self, path: str) -> bytes:
        """Returns the content of a file of the commit. Raises ValueError if it can't be read."""
        return self._git("cat-file", "blob", f"{self._repository.commit}:{path}")

    def _git(self, *arguments: str) -> bytes:
        """Runs git in the folder; returns its output."""
        what = f"{self._repository.url}: commit {self._repository.commit[:12]}"
        try:
            done = subprocess.run(
                ["git", "-C", str(self._folder), *arguments],
                capture_output=True,
                timeout=_SECONDS,
                env=os.environ | _ENVIRONMENT,
            )
        except FileNotFoundError:
            raise ValueError(f"{what}: git is not installed") from None
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{what}: no answer within {_SECONDS} s; the same command continues"
            ) from None

        # The reason is in a line that begins with "fatal:", or else in the last line.
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
            reason = next((line for line in lines if line.startswith("fatal:")), lines[-1])
            raise ValueError(f"{what} can't be read: {reason.removeprefix('fatal: ')}")
        return done.stdout
