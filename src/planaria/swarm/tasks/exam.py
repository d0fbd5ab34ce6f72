"""What a program is tested by, and what its tests take from it: told by the tests' own source."""

from __future__ import annotations

import ast
import builtins
import warnings
from collections.abc import Set
from dataclasses import dataclass

BUILT_IN = frozenset(dir(builtins))


def parsed(source: str) -> ast.Module:
    """Some Python as a tree; an empty one if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in it
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def free_names(source: str, known: Set[str] = BUILT_IN) -> set[str]:
    """Names that some Python reads and nowhere binds, but for those ``known``; none if it is no Python."""
    nodes = list(ast.walk(parsed(source)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return read - bound - known


@dataclass(frozen=True)
class Exam:
    """How a program is tested: by Python that is not the program's."""

    tests: str
    names: tuple[str, ...]
    """what the tests take from the program"""
    first: str = ""
    """runs before the tests beside them: imports and helpers that they use"""
    setup: str = ""
    """runs behind the program in its own process: what its functions use, or are given that is no plain value"""

    @classmethod
    def of(cls, tests: str) -> Exam:
        """Tests that take from the program each name which they do not bind and Python does not have."""
        return cls(tests, tuple(sorted(free_names(tests))))
