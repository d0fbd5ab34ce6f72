"""Sums: scored by the answer alone, and sound only if every step is true."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums

TWO = Sums()
WORDS = Sums(style="words")
numbers = st.integers(0, TWO.training + TWO.held_out - 1)
tasks = st.builds(Sums, digits=st.integers(2, 18), style=st.sampled_from(["columns", "words"]))


def numbered(prompt: str) -> TaskProblem:
    return next(p for n in range(TWO.training + TWO.held_out) if (p := TWO.problem(n)).prompt == prompt)


CARRIES = numbered("47+85=")
PLAIN = numbered("23+45=")


def test_every_pair_of_two_digits_is_one_problem_and_a_tenth_is_held_out() -> None:
    problems = [TWO.problem(n) for n in range(TWO.training + TWO.held_out)]
    assert {p.prompt for p in problems} == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert (TWO.training, TWO.held_out) == (7290, 810)
    assert all(p.number == n for n, p in enumerate(problems))


def test_larger_operands_differ_and_keep_their_digits() -> None:
    task = Sums(digits=7)
    drawn = {task.operands(n) for n in range(2000)}
    assert len(drawn) == 2000
    assert all(10**6 <= x < 10**7 for pair in drawn for x in pair)
    assert task.training + task.held_out == 1_000_000


def test_solutions_are_written_in_the_style() -> None:
    rng = random.Random(0)
    assert TWO.solution(CARRIES, rng) == "7+5=12,4+8+1=13;[132]"
    assert WORDS.solution(CARRIES, rng) == "5+7=12 keep 2 carry 1;8+4+1=13;[132]"
    assert TWO.solution(PLAIN, rng) == "3+5=8,2+4=6;[68]"
    assert WORDS.solution(PLAIN, rng) == "5+3=8 keep 8 carry 0;4+2=6;[68]"


@given(tasks, tasks, st.integers(0, 7000), st.randoms())
def test_a_solution_scores_and_is_sound_in_either_style(
    writer: Sums, reader: Sums, number: int, rng: random.Random
) -> None:
    reader = Sums(digits=writer.digits, style=reader.style)
    problem = writer.problem(number)
    text = writer.solution(problem, rng)
    assert reader.score(problem, text) == 1
    assert reader.sound(problem, text)
    assert reader.fingerprint == writer.fingerprint


@given(tasks, st.integers(0, 7000), st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_noisy_solution_is_sound_exactly_when_it_scores(
    task: Sums, number: int, noise: float, rng: random.Random
) -> None:
    problem = task.problem(number)
    text = task.noisy_solution(problem, rng, noise)
    assert task.sound(problem, text) == (task.score(problem, text) == 1)


def test_the_expected_share_of_noisy_solutions_is_wrong() -> None:
    rng = random.Random(1)
    wrong = sum(TWO.score(p, TWO.noisy_solution(p, rng, 0.2)) == 0 for p in map(TWO.problem, range(4000)))
    assert 0.33 < wrong / 4000 < 0.39  # 1 - 0.8² = 0.36, give or take four standard errors


@given(numbers, st.randoms(use_true_random=False))
def test_an_error_propagates_to_the_answer(number: int, rng: random.Random) -> None:
    text = TWO.noisy_solution(TWO.problem(number), rng, 1.0)
    reasoning, _, answer = text.partition(";")
    low, high = (int(equation.partition("=")[2]) for equation in reasoning.split(","))
    carries = int(reasoning.partition(",")[2].partition("=")[0].split("+")[2]) if low >= 10 else 0
    assert carries == low // 10
    assert answer == f"[{high * 10 + low % 10}]"


@pytest.mark.parametrize(
    "answer", ["132 ", " 132", "0132", "+132", "132.0", "1 32", "131", "", "132\0", "１３２", "1_32", "-132"]
)
def test_only_the_exact_sum_scores(answer: str) -> None:
    assert TWO.score(CARRIES, f"7+5=12,4+8+1=13;[{answer}]") == 0


def test_a_peer_chooses_sums_by_the_columns_that_carry() -> None:
    tasks = {carries: Sums(carries=carries) for carries in ("00", "10", "01", "11")}
    chosen = {carries: [*filter(task.chooses, range(400))] for carries, task in tasks.items()}
    assert sorted(n for numbers in chosen.values() for n in numbers) == list(range(400)), "each sum is of one kind"
    for carries, numbers in chosen.items():
        for a, b in map(TWO.operands, numbers):
            assert (a % 10 + b % 10 >= 10, a + b >= 100) == (carries[0] == "1", carries[1] == "1")
    assert TWO.chooses(0) and Sums(carries="01").fingerprint == TWO.fingerprint
    with pytest.raises(ValidationError):
        Sums(carries="2")


@pytest.mark.parametrize("text", ["[132]", "zz7+5=12,4+8+1=13;[132]", "2+2=5,7+5=12,4+8+1=13;[132]", "[132]\n"])
def test_the_reasoning_is_not_scored(text: str) -> None:
    assert TWO.score(CARRIES, text) == 1
    assert not TWO.sound(CARRIES, text)


SOUND = ["7+5=12,4+8+1=13;[132]", "5+7=12 keep 2 carry 1;8+4+1=13;[132]"]
UNSOUND = [
    "7+5=12,8+4+1=13;[132]",
    "5+7=12,8+4+1=13;[132]",
    "7+5=12 keep 2 carry 1;4+8+1=13;[132]",
    "7+5=12,4+8+1=13;[131]",
    "7+5=13,4+8+1=13;[132]",
    "7+5=12,4+8+1=14;[132]",
    "7+5=12,4+8=12;[132]",
    "7+5=12,1+4+8=13;[132]",
    "6+6=12,4+8+1=13;[132]",
    "4+8=12,7+5+1=13;[132]",
    "7+5=12;[132]",
    "7+5=12,4+8+1=13[132]",
    "7+5=12,4+8+1=13;;[132]",
    "7+5=12,4+8+1=13,0+0+1=1;[132]",
    "7+5=12,4+8+1=13;2+2=5;[132]",
    "7+5=12;4+8+1=13;[132]",
    "7+5=12 keep 2 carry 0;4+8+1=13;[132]",
    "7+5=12 keep 3 carry 1;4+8+1=13;[132]",
    "7+5=12 keep 2 carry 1;4+8+1=13 keep 3 carry 1;[132]",
    "7+5=12, 4+8+1=13;[132]",
    "07+5=12,4+8+1=13;[132]",
    "7+5=12,4+8+1=13;[132] ",
    "",
]


@pytest.mark.parametrize(("text", "sound"), [*((t, True) for t in SOUND), *((t, False) for t in UNSOUND)])
def test_a_sound_solution_has_only_true_and_needed_steps(text: str, sound: bool) -> None:
    assert TWO.sound(CARRIES, text) is sound


@given(numbers, st.sampled_from([TWO, WORDS]), st.text(min_size=1), st.integers(0, 40), st.randoms())
def test_an_insertion_makes_a_solution_unsound(
    number: int, task: Sums, phrase: str, at: int, rng: random.Random
) -> None:
    problem = task.problem(number)
    text = task.solution(problem, rng)
    assert not task.sound(problem, text[:at] + phrase + text[at:])


@given(numbers, st.text(st.characters(exclude_categories=())))
def test_no_text_raises(number: int, text: str) -> None:
    problem = TWO.problem(number)
    assert TWO.score(problem, text) == 0
    assert not TWO.sound(problem, text)
