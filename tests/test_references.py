"""Names and files that docstrings and comments refer to exist, and fields are documented in one style."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
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


def members_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (class, member) of each class of a module; members include what methods assign."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in ast.walk(owner):
                match node:
                    case ast.FunctionDef(name=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                        yield owner.name, name
                    case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                        yield owner.name, name


def test_a_referenced_member_belongs_to_its_class() -> None:
    """Of ``Class.member``, the class or a class with a base has that member; classes of libraries are not checked."""
    trees = {file: ast.parse(file.read_text()) for file in SOURCES}
    members = {pair for tree in trees.values() for pair in members_of(tree)}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def has(name: str, member: str) -> bool:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
        return (name, member) in members or any(has(base, member) for base in bases)

    missing = [
        f"{file.relative_to(ROOT)}: {reference}"
        for file in SOURCES
        for reference in ROLE.findall(file.read_text())
        if len(parts := reference.lstrip("~").split(".")) > 1
        if parts[-2] in classes and not has(parts[-2], parts[-1])
    ]
    assert not missing, "\n".join(missing)


def test_every_documented_parameter_exists() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {name}"
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in re.findall(r":param (\w+):", ast.get_docstring(node) or "")
        if name not in {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
    ]
    assert not wrong, "\n".join(wrong)


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


PROPER = {"AdamW", "Byzantine", "False", "None", "Okabe", "Python", "True", "Weiszfeld"}
"""capitalised words with which the documentation of a field may begin; acronyms and symbols may, too"""


def field_docs(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the documentation of a module's constants and its classes' fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for field, after in pairwise(node.body):
                match field, after:
                    case (ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str()) as doc)):
                        yield doc


def is_sentence(text: str) -> bool:
    word = re.match(r"A(?= )|[A-Z][a-z]+(?![A-Za-z_0-9])", text)
    return text.endswith(".") or (word is not None and word[0] not in PROPER)


def test_a_field_is_documented_by_a_fragment() -> None:
    """One line begins in lower case and has no full stop; longer documentation may have sentences."""
    sentences = [
        f"{file.relative_to(ROOT)}:{doc.lineno}: {doc.value}"
        for file in SOURCES
        for doc in field_docs(ast.parse(file.read_text()))
        if doc.lineno == doc.end_lineno and is_sentence(str(doc.value))
    ]
    assert not sentences, "\n".join(sentences)


def test_sentences_are_distinguished_from_fragments() -> None:
    assert all(map(is_sentence, ("Steps of a race", "steps of a race.", "A race")))
    assert not any(map(is_sentence, ("steps of a race", "None: unknown", "SHA-256 of it", "Python's warnings", "J")))
