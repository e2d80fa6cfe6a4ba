"""The lines of the user's files in which the instructions of a program were written.

JAX gives each operation the stack of the user's frames at its call. XLA keeps the frames in one
table per program, and compilers keep an instruction's index in it, or its file and line.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from xla_spmd.hlo import hlo_proto


def read(serialized: bytes) -> Mapping[str, str]:
    """Returns `model.py:12` by op_name, for the operations of an HloModuleProto with a known line.

    An operation that was called in several places has the line of its first call.
    """
    proto = hlo_proto.messages()["xla.HloModuleProto"].FromString(serialized)
    lines: dict[str, str] = {}
    for computation in proto.computations:
        for instruction in computation.instructions:
            metadata = instruction.metadata
            line = _line(metadata, proto.stack_frame_index)
            if metadata.op_name and line is not None:
                lines.setdefault(metadata.op_name, line)
    return lines


def _line(metadata: Any, frames: Any) -> str | None:
    """Returns the file and line of an instruction's innermost frame; None if unknown."""
    if metadata.source_file:
        return f"{pathlib.PurePath(metadata.source_file).name}:{metadata.source_line}"
    if not metadata.stack_frame_id or metadata.stack_frame_id > len(frames.stack_frames):
        return None

    # Indices into the tables count from 1.
    frame = frames.stack_frames[metadata.stack_frame_id - 1]
    location = frames.file_locations[frame.file_location_id - 1]
    file_name = frames.file_names[location.file_name_id - 1]
    return f"{pathlib.PurePath(file_name).name}:{location.line}"
