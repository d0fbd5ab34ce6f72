"""Which software, machine and command started a run."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from planaria import __version__
from planaria.control.started import Provenance


def provenance() -> Provenance:
    """Describe this process."""
    return Provenance(
        version=f"planaria {__version__}, Python {platform.python_version()}, PyTorch {metadata.version('torch')}",
        machine=f"{platform.node()} ({platform.machine()}, {os.cpu_count()} processors)",
        command=command_line(sys.argv),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Return a command line with the program's name alone, and without passwords, tokens and queries of URLs."""
    program, *rest = arguments or ["python"]
    public = (re.sub(r"(://)[^/@\s]*@|\?.*$", r"\1", word) if "://" in word else word for word in rest)
    return shlex.join([Path(program).name, *public])
