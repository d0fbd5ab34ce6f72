"""Export and import of checkpoint folders of other programs: torch's DCP, DeepSpeed's universal layout, Hugging Face.

Only the writers for other programs write pickles. Foreign folders are read in a child process with bounded memory
(:func:`read_apart` starts ``reading.py``), by readers that only know tensors (``unpickling.py``).
"""

from __future__ import annotations

from pathlib import Path

from planaria.common import child_process, documents
from planaria.config.schema import ModelConfig
from planaria.runtime.checkpoint.cut import RunCut, declared_tensors

SECONDS, SLOWEST = 120.0, 1e6
"""seconds for a folder, and bytes that may take one more second"""
ROOM = 512 << 20
"""bytes besides stages and tensors"""


class ReadRequest(documents.Record):
    """A request to read a folder of this format, and to write the stages of a model with this cut."""

    folder: str
    format: str
    names: str | None
    """file with a map of names"""
    model: ModelConfig
    stages: int
    to: str
    """folder for the stages' files"""


class ReadReply(documents.Record):
    """The result of a :class:`ReadRequest`."""

    step: int = 0
    samples: int | None = None
    """None: unknown"""
    digests: tuple[str, ...] = ()
    """digests of the stages' files, in order"""
    notes: tuple[str, ...] = ()


def read_apart(job: ReadRequest) -> ReadReply:
    """Read a folder in a child process, whose memory is limited by the expected model.

    :raises UserError: if the folder is rejected, or its reader fails or takes too long.
    """
    seconds = SECONDS + _bytes_in(Path(job.folder)) / SLOWEST
    room = room_for(job.model, job.stages)
    reader = "planaria.runtime.checkpoint.foreign.reading:answer_request"
    reply = child_process.call(
        reader, job.model_dump_json().encode(), room, seconds, job.folder, "use an undamaged folder"
    )
    return documents.parse_model(ReadReply, reply, "the reader of a foreign folder")


def room_for(model: ModelConfig, stages: int) -> int:
    """Return the memory limit for reading: the largest stage with moments, and several times its largest tensors."""
    parameters = [
        [entry.nbytes for entry in declared_tensors(RunCut(model, stages), s).values()] for s in range(stages + 1)
    ]
    return ROOM + 3 * max(map(sum, parameters)) + 12 * max(map(max, parameters))


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
