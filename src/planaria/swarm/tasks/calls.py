"""Calls of a function: read from a file or out of tests, and varied, so that nobody can prepare for all of them."""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.swarm.tasks import values
from planaria.swarm.tasks.sandbox import TELL, Exam, parsed

MOST = 64
"""calls of one problem that are made: what a cage reports is bounded"""
LONGEST = 2000
"""characters of one call"""
TRIES = 8
"""draws for each variant that is wanted: many come out as one that is there already"""
CHANGED = 0.7
"""of a call's arguments, so many are changed"""


@dataclass(frozen=True)
class Call:
    """A function's name and what it is given: literals alone."""

    name: str
    args: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def source(self) -> str:
        """As Python."""
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.named)]
        return f"{self.name}({', '.join(given)})"


def read(text: str, name: str) -> Call:
    """The call of ``name`` that a text is. ValueError, saying why, when it is none with literal arguments."""
    body = parsed(text).body
    node = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if len(text) > LONGEST:
        raise ValueError(f"a call of more than {LONGEST} characters")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text!r} is no call of a function")
    if node.func.id != name:
        raise ValueError(f"{text!r} is no call of {name}")
    try:
        return _call(node, name)
    except (ValueError, TypeError):
        raise ValueError(f"{text!r} has arguments that are no literals") from None


def in_tests(tests: str, names: Mapping[str, str]) -> list[Call]:
    """The calls that some tests make with literal arguments, each once, in their order.

    ``names``: what the tests call a function → its name.
    """
    found: dict[str, Call] = {}
    for node in _in_order(parsed(tests)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            try:
                call = _call(node, names[node.func.id])
            except (ValueError, TypeError, RecursionError):
                continue
            if len(call.source) <= LONGEST:
                found.setdefault(call.source, call)
    return list(found.values())


def variants(calls: Sequence[Call], seed: int | str, count: int) -> list[Call]:
    """At most ``count`` calls like those, and none of them: numbers moved, lists shuffled, strings cut."""
    rng = random.Random(seed)
    found: dict[str, Call] = {}
    known = {call.source for call in calls}
    for _ in range(count * TRIES if calls else 0):
        if len(found) == count:
            break
        call = _varied(rng.choice(calls), rng)
        if call.source not in known and len(call.source) <= LONGEST:
            found.setdefault(call.source, call)
    return list(found.values())


def exam(calls: Collection[Call], setup: str = "") -> Exam:
    """An exam that passes or fails nobody, and tells of each call the digest of its value, or an empty line."""
    asked = [f"lambda: {call.source}" for call in calls]
    tests = f"for _call in ({''.join(f'{one}, ' for one in asked)}):\n"
    tests += (
        f"    try:\n        _told = digest(_call())\n    except Exception:\n        _told = ''\n    {TELL}(_told)\n"
    )
    return Exam(tests, tuple(sorted({call.name for call in calls})), Path(values.__file__).read_text(), setup)


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, in the order of the text."""
    for node in ast.iter_child_nodes(tree):
        yield node
        yield from _in_order(node)


def _call(node: ast.Call, name: str) -> Call:
    args = tuple(map(ast.literal_eval, node.args))
    if any(word.arg is None for word in node.keywords):
        raise ValueError("two stars")
    return Call(name, args, tuple((str(word.arg), ast.literal_eval(word.value)) for word in node.keywords))


def _varied(call: Call, rng: random.Random) -> Call:
    return Call(
        call.name,
        tuple(_moved(one, rng) if rng.random() < CHANGED else one for one in call.args),
        tuple((name, _moved(one, rng) if rng.random() < CHANGED else one) for name, one in call.named),
    )


def _moved(value: Any, rng: random.Random) -> Any:
    """Another value like this one: of its type, and of its sign if it is a number."""
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, int | float):
        return _number_moved(value, rng)
    if isinstance(value, str | bytes):
        return _cut(value, rng)
    if isinstance(value, list | tuple):
        return type(value)(_shuffled(list(value), rng))
    if isinstance(value, set | frozenset):
        return type(value)(_moved(one, rng) for one in sorted(value, key=repr))
    if isinstance(value, dict):
        return {key: _moved(one, rng) for key, one in value.items()}
    return value


def _number_moved(value: float, rng: random.Random) -> float:
    """Near it, or about half or twice as large. Zero may become positive, nothing else another sign."""
    far = rng.choice([value, value, value * 2, value / 2])
    step = rng.choice([-1, 1]) * rng.randint(1, 8)
    if isinstance(value, float):
        moved = round(far + step * max(abs(far), 1.0) / 8, 4)
        return moved if moved * value > 0 else abs(moved) if not value else far
    moved = int(far) + step
    return moved if moved * value > 0 else abs(moved) if not value else (value > 0) - (value < 0)


def _cut(value: Any, rng: random.Random) -> Any:
    """A piece of a text, or its letters in another order."""
    if len(value) < 2:
        return value
    if rng.random() < 0.5:
        start = rng.randrange(len(value))
        return value[start : rng.randrange(start, len(value)) + 1]
    letters = [value[n : n + 1] for n in range(len(value))]
    rng.shuffle(letters)
    return type(value)().join(letters)


def _shuffled(items: list[Any], rng: random.Random) -> list[Any]:
    """Them in another order, with one less, or with some of them changed."""
    match rng.randrange(3):
        case 0:
            rng.shuffle(items)
        case 1 if len(items) > 1:
            del items[rng.randrange(len(items))]
        case _:
            items = [_moved(one, rng) if rng.random() < 0.5 else one for one in items]
    return items
