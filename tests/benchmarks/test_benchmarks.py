"""Every benchmark can be imported. mypy checks its calls."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(file.stem for file in Path(benchmarks.__file__).parent.glob("*.py") if file.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("benchmarks", "planaria", "tests"):
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize(("module", "name"), [("advice", "EXPERIENCE"), ("compression", "EXPERIENCE")])
def test_experience_replaces_the_files_that_the_package_reads(module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"benchmarks.{module}"), name).is_file()
