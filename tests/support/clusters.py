"""Shared by the tests of deploy/: its files, and machines that are processes and folders of this one."""

from __future__ import annotations

import json
import os
import random
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
"""a ``planaria`` that records its command line and its keys"""
RECIPE = """
name = "mine"
model = {{vocab = 260, dim = 16, heads = 2, hidden = 32, context = 16, layers = 2}}
pipeline = {{stages = 2, microbatches = 2, microbatch_size = 2}}
data = {{source = "{folder}/corpus.txt", tokenizer = "bytes", cache = "{folder}/cache"}}
train = {{steps = 30, eval_every = 0}}
checkpoint = {{every = 3}}
recovery = {{strategy = "checkpoint"}}
fleet = {{spares = 0, missed_heartbeats = 40}}
network = {{emulate = "links", latency_s = 0.02}}
"""
"""three workers; a step takes about a tenth of a second, for tests that interrupt it"""
REAL = '#!/bin/sh\nexec {python} -m planaria "$@"\n'


@dataclass(frozen=True)
class Call:
    """A command line of planaria, with the mode and text of its key file."""

    words: list[str]
    keys: dict[str, list[str]]


def shell(path: Path, text: str) -> None:
    """Write a command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def recording(folder: Path) -> Path:
    """Return a folder of commands with a ``planaria`` that only records its command line."""
    (folder / "notes").mkdir(parents=True)
    shell(folder / "bin" / "planaria", NOTES.format(python=sys.executable, notes=str(folder / "notes")))
    return folder / "bin"


def recorded(folder: Path) -> list[Call]:
    """Return the recorded command lines, ``train`` first."""
    found = [Call(**json.loads(path.read_text())) for path in (folder / "notes").iterdir()]
    return sorted(found, key=lambda call: call.words[0] != "train")


def real(folder: Path) -> Path:
    """Return a folder of commands with the real ``planaria``."""
    shell(folder / "bin" / "planaria", REAL.format(python=sys.executable))
    return folder / "bin"


def recipe(folder: Path) -> Path:
    """Return the path of a recipe that trains for seconds."""
    words = random.Random(34107).choices(("tide", "mud", "eel", "planarian", "moon"), k=3000)
    (folder / "corpus.txt").write_text(" ".join(words))
    (folder / "mine.toml").write_text(RECIPE.format(folder=folder))
    return folder / "mine.toml"


def environment(commands: Path, home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process whose folders are those of another machine."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    path = f"{commands}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(home), "TMPDIR": str(home / "tmp"), **more}


def read(name: str) -> str:
    return (DEPLOY / name).read_text()


def kubernetes() -> list[dict[str, Any]]:
    """Return the objects of kubernetes.yaml."""
    return list(yaml.safe_load_all(read("kubernetes.yaml")))


def pod(part: str) -> dict[str, Any]:
    """Return the pod of one of its jobs: controller or machine."""
    templates = [job["spec"]["template"] for job in kubernetes() if job["kind"] == "Job"]
    (spec,) = (template["spec"] for template in templates if template["metadata"]["labels"]["part"] == part)
    return dict(spec)


def skypilot() -> dict[str, Any]:
    return dict(yaml.safe_load(read("skypilot.yaml")))
