"""A run's folder for the live page."""

from __future__ import annotations

from pathlib import Path

from planaria.control.log.reader import CONFIG

CONFIGURED = '{"name": "run", "model": {"vocab": 300}, "data": {"source": "none"}, "pipeline": {"stages": 2}}'


def folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(CONFIGURED)
    return path
