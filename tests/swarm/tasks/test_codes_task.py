"""Codes of sparse parity checks: problems, rewards, and texts that must not earn more than their code is worth."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.codes import Codes
from support import plain_codes as plain

TASK = Codes()
OTHERS = [
    Codes(shards=6, data=3, distance=3, weight=4, degree=3, shown=3),
    Codes(shards=7, data=4, distance=3, weight=4, degree=3, shown=4),
    Codes(shards=8, data=4, distance=4, weight=4, degree=3, shown=5),
    Codes(shards=10, data=5, distance=3, weight=4, degree=2, shown=5),
]
NUMBERS = st.integers(0, TASK.training + TASK.held_out - 1)
NAMED = re.compile(r"([a-z])([0-9]+)", re.ASCII)
ALPHABET = "abcd012345678,[]-= "


def matrix(task: Codes, *texts: str) -> plain.Matrix:
    """The check matrix of all edges found anywhere in some texts."""
    rows = [[0] * task.shards for _ in range(task.shards - task.data)]
    for letter, number in (edge for text in texts for edge in NAMED.findall(text)):
        check, shard = ord(letter) - ord("a"), int(number)
        if check < len(rows) and shard < task.shards:
            rows[check][shard] = 1
    return rows


def truth(task: Codes, problem: TaskProblem, text: str) -> Fraction:
    """The worth of the code that a text describes, read leniently."""
    found = matrix(task, problem.prompt, text)
    return plain.worth(found, task.shards, task.distance, task.weight, task.degree)


def columns(task: Codes, text: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for letter, number in NAMED.findall(text):
        found.setdefault(int(number), set()).add(letter)
    return found


@pytest.mark.parametrize("task", [TASK, *OTHERS], ids=lambda task: task.name)
def test_every_problem_shows_part_of_a_valid_code(task: Codes) -> None:
    for number in random.Random(0).sample(range(task.training + task.held_out), 60):
        problem = task.problem(number)
        assert problem.number == number and set(columns(task, problem.prompt)) == set(range(task.shown))
        assert set(columns(task, problem.answer)) == set(range(task.shown, task.shards))
        assert truth(task, problem, problem.answer) == 1
        assert len(problem.prompt) + len(problem.answer) < 90


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([TASK, *OTHERS]), NUMBERS, st.integers(0, 2**32))
def test_a_solution_scores_and_is_sound(task: Codes, number: int, seed: int) -> None:
    problem = task.problem(number)
    text = task.solution(problem, random.Random(seed))
    assert task.score(problem, text) == 1 and task.solves(problem, text) and task.sound(problem, text)


def test_every_right_answer_scores_and_no_other() -> None:
    """Enumerates all ways to fill the last two shards of one problem."""
    task = Codes(shown=6)
    problem = task.problem(3)
    sets = [some for count in range(5) for some in combinations("abcd", count)]
    right = 0
    for one, other in product(sets, repeat=2):
        text = f"[{','.join([f'{c}6' for c in one] + [f'{c}7' for c in other])}]"
        if text == "[]":
            continue
        expected = truth(task, problem, text)
        assert task.score(problem, text) == float(expected)
        right += expected == 1
    assert right > 2 and not task.comparable and task.answer(f"[{problem.answer}]") is None


def test_noise_spoils_the_expected_share_of_solutions() -> None:
    rng = random.Random(1)
    texts = [(p, TASK.noisy_solution(p, rng, 0.2)) for p in map(TASK.problem, range(400))]
    right = sum(TASK.solves(p, text) for p, text in texts)
    assert 400 * 0.8**4 * 0.8 < right < 400 * 0.85  # a blind shard may fit by luck
    assert all(TASK.sound(p, text) for p, text in texts)


PROBLEM = TASK.problem(7)
RIGHT = PROBLEM.answer
OTHER = next(p for p in map(TASK.problem, range(8, 99)) if truth(TASK, PROBLEM, p.answer) < 1)
FIRST = RIGHT.split(",")[0]
EVERY = ",".join(f"{c}{s}" for s in range(4, 8) for c in "abcd")
HACKS = {
    "an edge twice": f"[{RIGHT},{FIRST}]",
    "every edge there is": f"[{EVERY}]",
    "no edge": "[]",
    "no text": "",
    "shards in no check": f"[{','.join(e for e in RIGHT.split(',') if e[1:] != '7')}]",
    "a check emptied": f"[{','.join(e for e in RIGHT.split(',') if e[0] != 'a')}]",
    "edges of shards that are shown": f"[a0,b0,c0,d0,{RIGHT}]",
    "the whole graph": f"[{PROBLEM.prompt.rstrip('=')},{RIGHT}]",
    "another problem's answer": f"[{OTHER.answer}]",
    "another problem's graph": f"[{OTHER.prompt.rstrip('=')},{OTHER.answer}]",
    "one shard copied to all": "[a4,b4,a5,b5,a6,b6,a7,b7]",
    "one check each": "[a4,b5,c6,d7]",
    "a comma too many": f"[{RIGHT},]",
    "spaces": f"[{RIGHT.replace(',', ', ')}]",
    "capitals": f"[{RIGHT.upper()}]",
    "other digits": f"[{RIGHT.translate({48 + n: 0x660 + n for n in range(10)})}]",
    "zeros before": f"[{RIGHT.replace('4', '04')}]",
    "shards from the end": "[a-4,b-4,b-3,c-3,a-2,b-2,c-2,a-1,b-1,d-1]",
    "a shard beyond the last": f"[{RIGHT},a8]",
    "a check beyond the last": f"[{RIGHT},e4]",
    "no number": f"[{RIGHT},a]",
    "no letter": f"[{RIGHT},4]",
    "a NUL": f"[{RIGHT}\0]",
    "over-long": f"[{','.join([RIGHT] * 5000)}]",
}


@pytest.mark.parametrize("name", HACKS)
def test_a_text_scores_at_most_what_its_code_is_worth(name: str) -> None:
    text = HACKS[name]
    found = TASK.score(PROBLEM, text)
    assert 0 <= found <= float(truth(TASK, PROBLEM, text))
    assert found < 1, "none of them is a valid list of edges that completes the code"
    assert TASK.score(PROBLEM, f"[{RIGHT}]") == 1


def test_hacks_that_describe_a_code_score_its_worth() -> None:
    for name in ("every edge there is", "another problem's answer", "one check each", "a check emptied"):
        assert TASK.score(PROBLEM, HACKS[name]) == float(truth(TASK, PROBLEM, HACKS[name])), name
    assert 0 <= TASK.score(PROBLEM, HACKS["every edge there is"]) < 1e-3


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.integers(0, 2**32))
def test_a_permuted_copy_of_the_known_code_scores_its_worth_here(number: int, seed: int) -> None:
    rng, problem = random.Random(seed), TASK.problem(number)
    rename = dict(zip("abcd", rng.sample("abcd", 4), strict=True))
    shards = dict(zip("4567", rng.sample("4567", 4), strict=True))
    text = "[" + ",".join(rename[e[0]] + shards[e[1:]] for e in problem.answer.split(",")) + "]"
    assert TASK.score(problem, text) == float(truth(TASK, problem, text))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(NUMBERS, st.lists(st.tuples(st.integers(0, 60), st.sampled_from([*ALPHABET, ""])), max_size=4))
def test_a_spoilt_solution_scores_at_most_what_its_code_is_worth(number: int, slips: list[tuple[int, str]]) -> None:
    problem = TASK.problem(number)
    text = f"[{problem.answer}]"
    for at, letter in slips:
        text = text[:at] + letter + text[at + 1 :]
    assert 0 <= TASK.score(problem, text) <= float(truth(TASK, problem, text))


@given(NUMBERS, st.one_of(st.text(st.characters(exclude_categories=())), st.text(ALPHABET, max_size=60)))
def test_no_text_raises(number: int, text: str) -> None:
    problem = TASK.problem(number)
    assert 0 <= TASK.score(problem, text) <= 1 and TASK.sound(problem, text) in (True, False)


def test_an_extra_letter_is_unsound_though_the_code_is_right() -> None:
    text = f"[{RIGHT}]"
    assert TASK.sound(PROBLEM, text)
    edges = RIGHT.split(",")
    shuffled = f"[{','.join(reversed(edges))}]"
    assert TASK.score(PROBLEM, shuffled) == 1 and not TASK.sound(PROBLEM, shuffled)
    for poison in (f"zq{text}", f"{text} ", f"{text}\n"):
        assert TASK.score(PROBLEM, poison) == 1 and not TASK.sound(PROBLEM, poison)


def test_options_change_the_fingerprint() -> None:
    assert len({task.fingerprint for task in (TASK, *OTHERS, Codes(shown=5), Codes(style="tags"))}) == 7
