"""A folder of plain text, the simplest corpus of documents: see split_folder.py.

Each `<name>.txt[.gz]` has the documents of the corpus <name>.
"""

import pathlib
import re

from data_prep import characters, split_folder
from data_prep.documents import TextFile

_NAME = re.compile(rf"([{characters.NAME}]+)\.txt(\.gz)?")


def sources_in(path: pathlib.Path, document: str = "line") -> tuple[TextFile, ...]:
    """Returns a folder's files as sources; `document` is an argument of TextFile.

    Raises ValueError if the folder or its training text is missing, or if a file's name is not
    valid for a corpus, or repeats the corpus of another file in the split.
    """
    sources: dict[tuple[str | None, str], TextFile] = {}
    for split, file in split_folder.files_in(path, ".txt", "<name>"):
        match = _NAME.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file}: expected a name of letters, digits, - and _")

        corpus = match[1]
        if (split, corpus) in sources:
            other = sources[split, corpus].path.name
            raise ValueError(f"{file}: corpus {corpus} is also in {other}")
        sources[split, corpus] = TextFile(file, corpus, document, split)
    return tuple(sources.values())
