"""Fields changed by name exist: the type checker does not see the keywords of ``updated`` and ``fast_replace``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from planaria.control.state.replica import ReplicaState

SOURCE = Path(__file__).parents[2] / "src/planaria"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def changes(function: str) -> Iterator[tuple[str, str]]:
    """Yield (place, keyword) of each call of a function."""
    for path, tree in TREES.items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function:
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        yield f"{path.relative_to(SOURCE)}:{call.lineno}", keyword.arg


def annotated() -> set[str]:
    """Return the names of all annotated fields of classes."""
    return {
        node.target.id
        for tree in TREES.values()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_every_call_of_updated_names_fields_of_a_replica() -> None:
    known, named = {field.name for field in fields(ReplicaState)}, [*changes("updated")]
    assert len(named) > 30 and not [f"{place}: {name}" for place, name in named if name not in known]


def test_fast_replace_names_fields() -> None:
    known, named = annotated(), [*changes("fast_replace")]
    assert len(named) > 10 and not [f"{place}: {name}" for place, name in named if name not in known]
