"""Programs compared by behaviour on calls from files, from tests, and on random variants."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.sandbox.sandbox import LIMITS, run
from planaria.swarm.sandbox.values import digest
from planaria.swarm.tasks import calls as calling
from planaria.swarm.tasks.answers import canonical, same_answer
from planaria.swarm.tasks.calls import Call
from support.swarm.task_builders import block, needs_sandbox, opened, written

CALLS = {"prompt": "def half(x):\n", "entry_point": "half", "calls": ["half(3)", "half(4)", "half(x=-7)"]}
CHECK = CALLS | {"test": "def check(candidate):\n    assert candidate(3) == 1.5\n    assert candidate(8) == 4\n"}
del CHECK["calls"]
ASSERTS = {"text": "Double a number.", "test_list": ["assert double(3) == 6", "assert double(-1) == -2"]}
PRINTS = {"question": "What is 1000 + 234?", "expected_answer": "1,234"}
LITERALS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.lists(LITERALS, max_size=3), st.integers(0, 99))
def test_variants_are_new_calls_of_the_same_shape_and_follow_from_the_seed(args: list[Any], seed: int) -> None:
    base = Call("f", tuple(args))
    found = calling.variants([base], seed, 6)
    assert found == calling.variants([base], seed, 6)
    assert len({call.source for call in found} | {base.source}) == len(found) + 1 <= 7
    for call in found:
        assert calling.parse_call(call.source, "f") == call
        assert [type(one) for one in call.args] == [type(one) for one in args]


@given(st.integers(1, 10**9), st.integers(0, 999))
def test_variants_of_numbers_keep_their_sign(number: int, seed: int) -> None:
    found = calling.variants([Call("f", (number, -number, number + 0.5))], seed, 4)
    assert found and all(a > 0 > b and c > 0 for a, b, c in (call.args for call in found))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (True, 1, True),
        (0.1 + 0.2, 0.3, True),
        (1e20, 10**20, True),
        (float("nan"), float("nan"), True),
        ({1, "a", (2,)}, {(2,), "a", 1}, True),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": True}, True),
        (Fraction(1, 2) * 2, 1, True),
        ([1], (1,), False),
        ("1", 1, False),
        (0.3, 0.3001, False),
        (None, "None", False),
        ("a", b"a", False),
        (float("inf"), float("-inf"), False),
        ([[], []], [[]], False),
        (["a,b"], ["a", "b"], False),
    ],
)
def test_digests_are_equal_where_python_values_are(one: Any, other: Any, same: bool) -> None:
    assert (digest(one) == digest(other)) is same


@given(LITERALS, LITERALS)
def test_equal_literals_have_equal_digests(one: Any, other: Any) -> None:
    if one == other:
        assert digest(one) == digest(other)


def test_a_value_that_is_not_plain_has_no_digest() -> None:
    with pytest.raises(TypeError):
        digest(object())


@given(st.integers(-(10**6), 10**6), st.sampled_from(["{}", "{}.0", "{:,}", " {}%", "{}.500"]))
def test_equal_answers_have_one_canonical_text(number: int, form: str) -> None:
    text = form.format(number)
    assert same_answer(canonical(text), text) or "/" in canonical(text)
    assert canonical(text) == canonical(canonical(text)) or "/" in canonical(text)
    assert (canonical(text) == canonical(str(number))) is same_answer(str(number), text)


@needs_sandbox
def test_behaviour_covers_calls_of_every_shape_and_half_of_the_tests(tmp_path: Path) -> None:
    task = opened(f"programs:{written(tmp_path / 'all.jsonl', CALLS, CHECK, ASSERTS, PRINTS)}")
    assert task.unlabelled == {0} and task.comparable and task.probing
    right = [
        task.behaviour(task.problem(n), block("def half(x): return x / 2\ndouble = lambda x: 2 * x"), 5)
        for n in (0, 1, 2)
    ]
    assert [len(one) for one in right] == [3 + 12, 1 + 12, 1 + 12] and all(None not in one for one in right)
    untested = task.behaviour(task.problem(1), block("def half(x): return x / 2"), 5, untested=True)
    assert len(untested) == 12 and not {*untested} & {digest(1.5), digest(4)}
    assert task.behaviour(task.problem(3), block("print(1234.0)"), 5) == ("1234",)
    assert task.behaviour(task.problem(0), "no program", 5) == ()
    assert task.score(task.problem(0), block("def half(x): return x / 2")) == 0, "the problem has no reference"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"calls": []}, "is not a list of 1 to 64 calls"),
        ({"calls": "half(3)"}, "is not a list of 1 to 64 calls"),
        ({"calls": ["third(3)"]}, r"'third\(3\)' is not a call of half"),
        ({"calls": ["half(3) + 1"]}, "is not a call of a function"),
        ({"calls": ["half(open('x'))"]}, "has arguments that are not literals"),
        ({"calls": ["half(**{'x': 1})"]}, "has arguments that are not literals"),
        ({"calls": ["half("]}, "is not a call of a function"),
    ],
)
@needs_sandbox
def test_an_invalid_call_is_reported_with_its_line(tmp_path: Path, line: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=rf"bad.jsonl:2: field 'calls'.*{message}; fix or remove the line"):
        opened(f"programs:{written(tmp_path / 'bad.jsonl', CALLS, CALLS | line)}")


@needs_sandbox
def test_a_program_cannot_report_in_the_judge_s_place() -> None:
    lines = (
        "import sys, os\nfor stream in (sys.stdout, sys.stderr):\n    print('+' + 'ab' * 12, file=stream, flush=True)\n"
    )
    forged = (
        lines
        + "nan = float('nan')\ndef __report__(x): return 1\n"
        + "def f(x):\n    os.write(2, b'+\\n')\n    return {x, 'a', nan}"
    )
    honest = "def f(x): return {float('nan'), 'a', x}"
    exam = calling.result_tests([Call("f", (n,)) for n in range(3)])
    assert run(forged, exam).reported == run(honest, exam).reported != () and "" not in run(honest, exam).reported


@needs_sandbox
def test_lines_reported_before_an_endless_call_are_kept() -> None:
    program = "def f(x):\n while x == 2: pass\n return x"
    outcome = run(program, calling.result_tests([Call("f", (n,)) for n in range(4)]), replace(LIMITS, seconds=1.0))
    assert outcome.kind == "timeout" and outcome.reported == (digest(0), digest(1))
