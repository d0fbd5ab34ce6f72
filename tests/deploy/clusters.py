"""What tests of deploy/ share: its files, and machines that are processes and folders of this one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KEY = "0123456789abcdef" * 4
NOTES = """#!{python}
import json, os, stat, sys
keys = {{name: sys.argv[i + 1] for i, name in enumerate(sys.argv) if name in ("--key-file", "--fleet.key")}}
files = {{name: [oct(stat.S_IMODE(os.stat(path).st_mode)), open(path).read()] for name, path in keys.items()}}
with open(os.path.join({notes!r}, str(os.getpid())), "w") as file:
    json.dump({{"words": sys.argv[1:], "keys": files}}, file)
"""
"""a ``planaria`` that writes down how it was called, and the keys that it was given"""


@dataclass(frozen=True)
class Call:
    """A command line of planaria, and mode and text of the file with its key."""

    words: list[str]
    keys: dict[str, list[str]]


def shell(path: Path, text: str) -> None:
    """A command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def noting(folder: Path) -> Path:
    """A folder of commands with a ``planaria`` that does nothing but write down how it was called."""
    (folder / "notes").mkdir(parents=True)
    shell(folder / "bin" / "planaria", NOTES.format(python=sys.executable, notes=str(folder / "notes")))
    return folder / "bin"


def noted(folder: Path) -> list[Call]:
    """How it was called: who leads first."""
    found = [Call(**json.loads(path.read_text())) for path in (folder / "notes").iterdir()]
    return sorted(found, key=lambda call: call.words[0] != "train")


def environment(commands: Path, home: Path, **more: str) -> dict[str, str]:
    """That of a process on a machine of its own, as far as folders go."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    path = f"{commands}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(home), "TMPDIR": str(home / "tmp"), **more}


def read(name: str) -> str:
    return (DEPLOY / name).read_text()


def kubernetes() -> list[dict[str, Any]]:
    """The objects of kubernetes.yaml."""
    return list(yaml.safe_load_all(read("kubernetes.yaml")))


def pod(part: str) -> dict[str, Any]:
    """The pod of one of its jobs: controller or machine."""
    templates = [job["spec"]["template"] for job in kubernetes() if job["kind"] == "Job"]
    (spec,) = (template["spec"] for template in templates if template["metadata"]["labels"]["part"] == part)
    return dict(spec)


def skypilot() -> dict[str, Any]:
    return dict(yaml.safe_load(read("skypilot.yaml")))
