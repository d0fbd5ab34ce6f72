"""Every benchmark can still be started: what it imports is there. What it calls is checked by mypy."""

from __future__ import annotations

import importlib
from pathlib import Path

import benchmarks
import pytest

MODULES = sorted(file.stem for file in Path(benchmarks.__file__).parent.glob("*.py") if file.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("benchmarks", "planaria", "tests"):
            raise
        pytest.skip(f"{error.name} is not installed")
