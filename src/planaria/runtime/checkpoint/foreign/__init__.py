"""Checkpoint folders of other programs, out and in: torch's DCP, DeepSpeed's universal layout, Hugging Face's weights.

Only the writers for other programs write pickles. Foreign folders are read in a process of its own with bounded memory
(:func:`read_apart` starts ``reading.py``), by readers that know tensors and nothing else (``unpickling.py``).
"""

from __future__ import annotations

from pathlib import Path

from planaria.common import apart, documents
from planaria.config.schema import ModelConfig
from planaria.runtime.checkpoint.cut import Cut, declared

SECONDS, SLOWEST = 120.0, 1e6
"""time for a folder, and bytes of it that may take one second more; a disk that is slower hangs"""
ROOM = 512 << 20
"""bytes beside stages and tensors"""


class Job(documents.Record):
    """Read a folder of this format, and write the stages of a model that is cut so."""

    folder: str
    format: str
    names: str | None
    """file of a map of names"""
    model: ModelConfig
    stages: int
    to: str
    """folder for the stages' files"""


class Reply(documents.Record):
    """What was read."""

    step: int = 0
    samples: int | None = None
    """None: the folder does not say"""
    digests: tuple[str, ...] = ()
    """of the stages' files, in order"""
    said: tuple[str, ...] = ()


def read_apart(job: Job) -> Reply:
    """Read a folder in a child process, whose memory is bounded by the model that the folder should hold.

    :raises UserError: when the folder is refused, or its reader fails or takes too long.
    """
    seconds = SECONDS + _bytes_in(Path(job.folder)) / SLOWEST
    room = room_for(job.model, job.stages)
    reader = "planaria.runtime.checkpoint.foreign.reading:answered"
    found = apart.call(reader, job.model_dump_json().encode(), room, seconds, job.folder, "give an undamaged folder")
    return documents.parse_model(Reply, found, "the reader of a foreign folder")


def room_for(model: ModelConfig, stages: int) -> int:
    """Bytes that reading may take: the largest stage with its moments, and its largest tensors some times over."""
    parameters = [[entry.nbytes for entry in declared(Cut(model, stages), s).values()] for s in range(stages + 1)]
    return ROOM + 3 * max(map(sum, parameters)) + 12 * max(map(max, parameters))


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
