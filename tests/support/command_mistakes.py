"""Commands that end with one line about a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.command_line import refused

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it again and again\n" * 200


def mistake(capfd: pytest.CaptureFixture[str], home: Path, arguments: list[Any], *names: str, out: str = "runs") -> str:
    """Return the one line with which a command fails; it has all ``names``, and no file below ``out`` changes."""
    before = files_of(home / out)
    line = refused(capfd, *arguments)
    assert all(name in line for name in names), line
    assert files_of(home / out) == before, "a failed command left something behind"
    return line


def files_of(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*") if p.name != "lock"}


def train(home: Path, *flags: str, recipe: str = "good.toml") -> list[str | Path]:
    return ["train", home / recipe, "--out", home / "runs", "--quiet", *flags]
