"""Names and files that docstrings and comments refer to exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/planaria").rglob("*.py"))
ROLE = re.compile(r":(?:func|meth|class|attr|data):`([^`]+)`")
FILE = re.compile(r"``([a-z_0-9/]+\.py)``")


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, imports or uses."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.alias(name=name):
                yield name.rpartition(".")[2]


def test_every_referenced_name_is_known() -> None:
    """A plain name is one of its module; of a qualified one, the last part is a name of planaria or of a library."""
    names = {file: set(names_of(ast.parse(file.read_text()))) for file in SOURCES}
    everywhere = set().union(*names.values())
    missing = []
    for file in SOURCES:
        for reference in ROLE.findall(file.read_text()):
            *owner, name = reference.lstrip("~").split(".")
            if name not in (everywhere if owner else names[file]):
                missing.append(f"{file.relative_to(ROOT)}: {reference}")
    assert not missing, "\n".join(missing)


def test_every_referenced_file_exists() -> None:
    known = {str(file.relative_to(ROOT / "src/planaria")) for file in SOURCES}
    known |= {str(file.relative_to(ROOT)) for file in ROOT.glob("[bdet]*/**/*.py")}
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES
        for name in FILE.findall(file.read_text())
        if not any(path == name or path.endswith("/" + name) for path in known)
    ]
    assert not missing, "\n".join(missing)
