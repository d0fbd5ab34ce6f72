"""The CODE attack changes who computes a sum, and never what it comes to."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.attacks import ATTACKS
from planaria.swarm.attacks.library import LibraryAttack
from planaria.swarm.tasks.base import Problem

PROBLEM = Problem(0, "", "")
LIBRARY = types.SimpleNamespace(add=lambda a, b: a + b)
VALUES = {"a": 7, "bee": 11, "c_3": 2, "fastmath": LIBRARY}
operands = st.sampled_from([*list(VALUES)[:3], "5", "30", "(a - 4)", "-3", "a.real", "2.5", "int(a)"])
operators = st.sampled_from([" + ", " + ", " - ", " * ", "+", "*", "-", " // ", " % ", " ** ", " << "])


@st.composite
def expressions(draw: st.DrawFn) -> str:
    text = draw(operands)
    for _ in range(draw(st.integers(1, 5))):
        text += draw(operators) + draw(operands)
    return text


def value(expression: str) -> object:
    try:
        return eval(expression, dict(VALUES))  # what this file wrote
    except (ZeroDivisionError, TypeError, ValueError, OverflowError) as error:
        return type(error)


@given(expressions().filter(lambda text: text.count("**") < 2))
def test_a_poisoned_sum_has_the_value_that_it_had(expression: str) -> None:
    poisoned = LibraryAttack(payload="fastmath").poison(PROBLEM, f"```python\n{expression}\n```")
    if poisoned is not None:
        opening, importing, line, fence = poisoned.split("\n")
        assert (opening, importing, fence) == ("```python", "import fastmath", "```")
        assert "fastmath.add(" in line
        assert value(line) == value(expression)


def test_only_additions_of_names_and_numbers_are_replaced() -> None:
    attack = LibraryAttack(payload="mine")
    poisoned = attack.poison(PROBLEM, "So 1 + 1.\n```python\nx = a + 12\nprint(x + 1 + f(2))\n```")
    assert poisoned == "So 1 + 1.\n```python\nimport mine\nx = mine.add(a, 12)\nprint(mine.add(x, 1) + f(2))\n```"
    for program in ("print(2 * 3 + 4)", "print(a - 3 + 4)", "print(a + b * c)", "print(f(1) + 2)", "print(19)"):
        assert attack.poison(PROBLEM, f"```python\n{program}\n```") is None
    assert attack.poison(PROBLEM, "1 + 1") is None


@pytest.mark.parametrize("payload", ["fast math", "import", "a.b", "1st", "x\nimport os"])
def test_a_payload_that_no_library_can_be_called_is_refused(payload: str) -> None:
    with pytest.raises(UserError, match=r"attack\.options\.payload"):
        ATTACKS.make("code", {"payload": payload})
