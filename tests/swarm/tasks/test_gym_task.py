"""reasoning-gym's problems: equal for every peer, and scored safely for any text."""

from __future__ import annotations

import ast
import inspect
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.tasks import gym
from planaria.swarm.tasks.answers import TAGS
from planaria.swarm.tasks.gym import Gym
from support.swarm.task_builders import opened

pytest.importorskip("reasoning_gym")
KINDS = ("chain_sum", "game_of_life", "boxnet", "prime_factorization", "spell_backward", "propositional_logic")
TASKS = {kind: Gym(kind=kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_depends_on_its_number_only(kind: str) -> None:
    numbers = [0, 1, 8_999, 9_000, 9_999]
    forwards = [TASKS[kind].problem(n) for n in numbers]
    other = Gym(kind=kind)
    backwards = [other.problem(n) for n in reversed(numbers)]
    assert forwards == backwards[::-1]
    assert len({p.prompt for p in forwards}) == 5
    assert other.fingerprint == TASKS[kind].fingerprint


def test_only_references_score() -> None:
    task = TASKS["chain_sum"]
    for number in range(50):
        problem = task.problem(number)
        text = task.solution(problem, random.Random(0))
        assert text == TAGS.write("", problem.answer)
        assert task.score(problem, text) == 1
        assert task.score(problem, TAGS.write("2+2=5", f" {problem.answer}\n")) == 1
        assert task.score(problem, TAGS.write("", f"{int(problem.answer) + 1}")) == 0
        assert task.score(problem, TAGS.write("", f"it is {problem.answer}")) == 0
        assert task.score(problem, problem.answer) == 0
        assert task.sound(problem, text) is None


def test_problems_with_many_right_answers_have_no_reference() -> None:
    task = TASKS["boxnet"]
    problem = task.problem(3)
    assert problem.answer == ""
    assert task.solution(problem, random.Random(0)) is None


def test_partial_scores_count_as_zero() -> None:
    task = TASKS["spell_backward"]
    problem = task.problem(0)
    nearly = problem.answer[:-1] + ("x" if problem.answer[-1] != "x" else "y")
    assert 0.5 < task._dataset.score_answer(nearly, task._entry(0)) < 1
    assert task.score(problem, TAGS.write("", nearly)) == 0


MORE = (lambda a: a * 50, lambda a: " ".join([a] * 50), lambda a: ", ".join([a] * 3), "{}qq".format, "{}\nmore".format)
BEFORE = ("more {}".format, "more\n{}".format)


def more_than_one(task: Gym, numbers: range) -> list[tuple[int, str]]:
    """Texts that score though they hold more than the right answer."""
    problems = [p for p in map(task.problem, numbers) if p.answer]
    texts = [(p, text(p.answer)) for p in problems for text in (*MORE, *BEFORE)]
    assert all(task.score(p, TAGS.write("", p.answer)) == 1 for p in problems)
    return [(p.number, text) for p, text in texts if text != p.answer and task.score(p, TAGS.write("", text))]


@pytest.mark.parametrize("kind", sorted(gym.EXACT))
def test_kinds_in_the_exact_list_accept_one_answer(kind: str) -> None:
    assert more_than_one(Gym(kind=kind), range(12)) == []


@pytest.mark.slow
def test_no_kind_accepts_several_answers_at_once() -> None:
    from reasoning_gym.factory import DATASETS

    found = {kind: more_than_one(Gym(kind=kind), range(12)) for kind in sorted(set(DATASETS) - set(gym.REFUSED))}
    assert {kind: texts for kind, texts in found.items() if texts} == {}


def test_a_solution_that_the_form_cannot_hold_is_none() -> None:
    task = Gym(kind="game_of_life", style="brackets")
    assert task.problem(0).answer.startswith("[[")
    assert task.solution(task.problem(0), random.Random(0)) is None
    assert TASKS["game_of_life"].solution(task.problem(0), random.Random(0)) is not None


@given(
    st.sampled_from(KINDS),
    st.integers(0, 20),
    st.one_of(
        st.text(st.characters(exclude_categories=())),
        st.recursive(
            st.sampled_from(["1", "{}", "null", '"a"', "nan", "1e999"]), lambda x: st.builds("[{}]".format, x)
        ),
    ),
)
def test_no_text_raises(kind: str, number: int, text: str) -> None:
    task = TASKS[kind]
    problem = task.problem(number)
    for completion in (text, TAGS.write("", text)):
        assert task.score(problem, completion) in (0.0, 1.0)


@pytest.mark.parametrize(("kind", "answer"), [("boxnet", "1"), ("prime_factorization", "x"), ("game_of_life", "{}")])
def test_an_answer_that_breaks_the_scorer_is_wrong(kind: str, answer: str) -> None:
    task = TASKS[kind]
    with pytest.raises(gym.RAISED):
        task._dataset.score_answer(answer, task._entry(0))
    assert task.score(task.problem(0), TAGS.write("", answer)) == 0


def test_scorers_are_not_shown_long_answers() -> None:
    task = TASKS["propositional_logic"]
    task._dataset.score_answer = lambda answer, entry: 1.0
    try:
        assert task.score(task.problem(0), TAGS.write("", "(" * gym.MAX_ANSWER)) == 1
        assert task.score(task.problem(0), TAGS.write("", "(" * (gym.MAX_ANSWER + 1))) == 0
    finally:
        del task._dataset.score_answer


def test_every_kind_that_may_evaluate_an_answer_is_rejected() -> None:
    """Fails when a new version of the package adds an ``eval`` to a kind that was not reviewed."""
    from reasoning_gym.factory import DATASETS

    reviewed = {
        "basic_arithmetic",  # its own problem
        "bf",  # its own problem, translated
        "bitwise_arithmetic",  # its own problem
        "number_sorting",  # its own reference
        "propositional_logic",  # its own parser, named as sympy's
    }
    dangerous = {"eval", "exec", "parse_expr", "sympify", "compile", "__import__"}
    found = set()
    for name, (cls, _) in DATASETS.items():
        tree = ast.parse(inspect.getsource(inspect.getmodule(cls)))  # type: ignore[arg-type]
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)} - {"re.compile"}
        if {call.rpartition(".")[2] for call in calls} & dangerous:
            found.add(name)
    assert {name for name, why in gym.REFUSED.items() if why == gym.CODE} <= found
    assert found - set(gym.REFUSED) <= reviewed
    assert set(gym.REFUSED) <= set(DATASETS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gym:chain_sun", "did you mean 'chain_sum'"),
        ("gym:", "is not known"),
        ("gym:countdown", "evaluates answers as code"),
        ("gym:coin_flip", "busy for hours"),
        ("gym:game_of_life_halting", "accepts wrong answers"),
        ("gym:sokoban", "accepts wrong answers"),
        ("gym:word_ladder", "differ from one process to the next"),
        ("gym:composite", "use one of those"),
    ],
)
def test_an_unusable_kind_is_reported(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(name)


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"pip install 'planaria\[gym\]'"):
        opened("gym:chain_sum")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kinds_are_the_same_in_every_process() -> None:
    """Asks for three problems of each kind in two orders, with two hash seeds."""
    program = """
import hashlib, json, sys
from reasoning_gym.factory import DATASETS
from planaria.swarm.tasks.gym import REFUSED, Gym
seen = {}
for kind in sorted(set(DATASETS) - set(REFUSED)):
    task = Gym(kind=kind)
    for number in eval(sys.argv[1]):
        problem = task.problem(number)
        seen[f"{kind} {number}"] = hashlib.sha256(repr((problem, task._entry(number))).encode()).hexdigest()
print(json.dumps(seen, sort_keys=True))
"""
    path = str(Path(gym.__file__).parents[2])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, order],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed, order in (("1", "(0, 7, 9999)"), ("2", "(9999, 7, 0)"))
    ]
    assert outputs[0] == outputs[1]
