"""Calls on which programs are compared: read from a file or from tests, and varied so that none can be anticipated."""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.swarm.sandbox import values
from planaria.swarm.sandbox.sandbox import REPORT, Limits, ProgramTests, parse_python, run
from planaria.swarm.tasks.base import Behaviour

MAX_CALLS = 64
"""maximum calls of one problem; a sandbox's report is bounded"""
LONGEST = 2000
"""maximum characters of one call"""
TRIES = 8
"""draws per requested variant; many draws repeat a known call"""
CHANGED = 0.7
"""probability that a variant changes an argument"""


@dataclass(frozen=True)
class Call:
    """A function's name and literal arguments."""

    name: str
    args: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def source(self) -> str:
        """Return the call as Python source."""
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.named)]
        return f"{self.name}({', '.join(arguments)})"


def parse_call(text: str, name: str) -> Call:
    """Parse a call of ``name`` with literal arguments. ValueError with the reason if the text is not one."""
    body = parse_python(text).body
    node = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if len(text) > LONGEST:
        raise ValueError(f"a call of more than {LONGEST} characters")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text!r} is not a call of a function")
    if node.func.id != name:
        raise ValueError(f"{text!r} is not a call of {name}")
    try:
        return _call_of(node, name)
    except (ValueError, TypeError):
        raise ValueError(f"{text!r} has arguments that are not literals") from None


def calls_in_tests(tests: str, names: Mapping[str, str]) -> list[Call]:
    """Return the distinct calls with literal arguments in some tests, in order of appearance.

    ``names`` maps the tests' name of a function to its real name.
    """
    result: dict[str, Call] = {}
    for node in _walk_in_order(parse_python(tests)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            try:
                call = _call_of(node, names[node.func.id])
            except (ValueError, TypeError, RecursionError):
                continue
            if len(call.source) <= LONGEST:
                result.setdefault(call.source, call)
    return list(result.values())


def variants(calls: Sequence[Call], seed: int | str, count: int) -> list[Call]:
    """Return up to ``count`` new calls of the same shape: numbers moved, lists shuffled, strings cut."""
    rng = random.Random(seed)
    result: dict[str, Call] = {}
    sources = {call.source for call in calls}
    for _ in range(count * TRIES if calls else 0):
        if len(result) == count:
            break
        call = _vary(rng.choice(calls), rng)
        if call.source not in sources and len(call.source) <= LONGEST:
            result.setdefault(call.source, call)
    return list(result.values())


def result_tests(calls: Collection[Call], setup: str = "") -> ProgramTests:
    """Return an exam without assertions that reports the digest of each call's value, or an empty line."""
    functions = "".join(f"lambda: {call.source}, " for call in calls)
    tests = (
        f"for _call in ({functions}):\n    try:\n        _found = digest(_call())\n"
        f"    except Exception:\n        _found = ''\n    {REPORT}(_found)\n"
    )
    return ProgramTests(tests, tuple(sorted({call.name for call in calls})), Path(values.__file__).read_text(), setup)


def run_calls(program: str, calls: Sequence[Call], limits: Limits, setup: str = "") -> Behaviour:
    """Run a program on some calls; return one part per call."""
    reported = run(program, result_tests(calls, setup), limits).reported
    return tuple(line or None for line in reported) + (None,) * (len(calls) - len(reported))


def _walk_in_order(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        yield from _walk_in_order(node)


def _call_of(node: ast.Call, name: str) -> Call:
    args = tuple(map(ast.literal_eval, node.args))
    if any(word.arg is None for word in node.keywords):
        raise ValueError("two stars")
    return Call(name, args, tuple((str(word.arg), ast.literal_eval(word.value)) for word in node.keywords))


def _vary(call: Call, rng: random.Random) -> Call:
    return Call(
        call.name,
        tuple(_change_value(one, rng) if rng.random() < CHANGED else one for one in call.args),
        tuple((name, _change_value(one, rng) if rng.random() < CHANGED else one) for name, one in call.named),
    )


def _change_value(value: Any, rng: random.Random) -> Any:
    """Return another value of the same type and, for a number, the same sign."""
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, int | float):
        return _change_number(value, rng)
    if isinstance(value, str | bytes):
        return _change_text(value, rng)
    if isinstance(value, list | tuple):
        return type(value)(_change_items(list(value), rng))
    if isinstance(value, set | frozenset):
        return type(value)(_change_value(one, rng) for one in sorted(value, key=repr))
    if isinstance(value, dict):
        return {key: _change_value(one, rng) for key, one in value.items()}
    return value


def _change_number(value: float, rng: random.Random) -> float:
    """Return a number near ``value``, its half or its double. Only zero may change its sign."""
    far = rng.choice([value, value, value * 2, value / 2])
    step = rng.choice([-1, 1]) * rng.randint(1, 8)
    if isinstance(value, float):
        moved = round(far + step * max(abs(far), 1.0) / 8, 4)
        return moved if moved * value > 0 else abs(moved) if not value else far
    moved = int(far) + step
    return moved if moved * value > 0 else abs(moved) if not value else (value > 0) - (value < 0)


def _change_text(value: Any, rng: random.Random) -> Any:
    if len(value) < 2:
        return value
    if rng.random() < 0.5:
        start = rng.randrange(len(value))
        return value[start : rng.randrange(start, len(value)) + 1]
    letters = [value[n : n + 1] for n in range(len(value))]
    rng.shuffle(letters)
    return type(value)().join(letters)


def _change_items(items: list[Any], rng: random.Random) -> list[Any]:
    match rng.randrange(3):
        case 0:
            rng.shuffle(items)
        case 1 if len(items) > 1:
            del items[rng.randrange(len(items))]
        case _:
            items = [_change_value(item, rng) if rng.random() < 0.5 else item for item in items]
    return items
