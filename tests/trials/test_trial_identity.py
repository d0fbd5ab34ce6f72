"""Stale results: another recipe, another version, or other code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planaria import __version__
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.trials import result_cache as module
from planaria.trials.result_cache import identity


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for importable modules, which are removed from ``sys.modules`` afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_identity_does_not_depend_on_the_order_of_settings() -> None:
    assert identity({"a": 1, "b": [2]}) == identity({"b": [2], "a": 1})
    assert identity({"a": 1}).difference(identity({"a": 2})) == "it was made with a different recipe"


def test_another_version_is_another_trial_unless_versions_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    old = identity({})
    monkeypatch.setattr(module, "__version__", "9.9")
    assert identity({}).difference(old) == f"it was made by planaria {__version__}, this is 9.9"
    assert identity({}).difference(old, versions=False) == ""


def test_editing_a_custom_class_changes_the_identity(mine: Path) -> None:
    (mine / "chosen_one.py").write_text("class Mine:\n    noise = 0.1\n")
    chosen = importlib.import_module("chosen_one")
    before = identity({}, [chosen.Mine])
    assert list(before.code) == ["chosen_one"] and identity({}, [chosen]) == before
    before.require_current()
    (mine / "chosen_one.py").write_text("class Mine:\n    noise = 0.2\n")
    now = identity({}, [chosen.Mine])
    assert now.difference(before) == "the code of chosen_one has changed since"
    assert identity({}).difference(before) == "the code of chosen_one has changed since", "the class is not used now"
    with pytest.raises(UserError, match=r"chosen_one\.py changed during a trial"):
        before.require_current()


def test_base_classes_count_but_not_planaria_or_python(mine: Path) -> None:
    (mine / "chosen_base.py").write_text("class Base:\n    pass\n")
    (mine / "chosen_two.py").write_text("from chosen_base import Base\n\nclass Mine(Base):\n    pass\n")
    chosen = importlib.import_module("chosen_two")
    assert list(identity({}, [chosen.Mine, RunConfig, dict]).code) == [
        *["chosen_base", "chosen_two"],
        *sorted({base.__module__ for base in RunConfig.__mro__} & {"pydantic.main"}),
    ]
    assert "torch.nn.modules.module" in identity({}, [torch.nn.Linear]).code


def test_code_without_a_file_is_rejected_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = type("Mine", (), {"__module__": "__main__"})
    with pytest.raises(UserError, match=r"__main__ has no source file .*; move the class to a file"):
        identity({}, [cell])
