"""Have a foreign folder read in a process of its own (``reading.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from planaria import documents
from planaria.config import ModelConfig
from planaria.errors import UserError
from planaria.fleet.birth import die_with_parent

START_S = 120.0
SLOWEST = 1e6
"""bytes a second; a disk that is slower hangs"""
_TAIL = 300


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
    """What became of it; ``refused`` says why nothing did."""

    refused: str = ""
    step: int = 0
    samples: int | None = None
    """None: the folder does not say"""
    digests: tuple[str, ...] = ()
    """of the stages' files, in order"""
    said: tuple[str, ...] = ()


def read_apart(job: Job) -> Reply:
    """What became of a job.

    :raises UserError: when the folder was refused, or its reader died or hung.
    """
    patience = START_S + _bytes_in(Path(job.folder)) / SLOWEST
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "planaria.checkpoint.foreign.reading"],
            input=job.model_dump_json().encode(),
            capture_output=True,
            timeout=patience,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{job.folder}: could not be read in {patience:.0f} s; is its disk there?") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit {done.returncode}"]
        raise UserError(f"{job.folder}: its reader ended with {said[-1][-_TAIL:]}; give an undamaged folder")
    reply = documents.parse_model(Reply, done.stdout, "the reader of a foreign folder")
    if reply.refused:
        raise UserError(reply.refused)
    return reply


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
