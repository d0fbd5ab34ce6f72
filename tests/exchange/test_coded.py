"""Gradient coding: formulas written out, patterns of stragglers that are tolerated or not, and invalid settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from benchmarks.coded import decoded
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.exchange.coded.base import NOBODY, Late, Scheme, Uncoded
from planaria.exchange.coded.gc import (
    GC,
    MAX_AMPLIFICATION,
    CyclicCode,
    MixedCode,
    RepetitionCode,
    code,
    encoding_matrix,
    rounding_amplification,
)
from planaria.exchange.coded.schemes import CodedSchedule, make_coded_schedule
from planaria.exchange.coded.sgc import MSGC, SRSGC

JOBS = 9
Rule = Callable[[list[Late]], bool]


@st.composite
def schemes(draw: st.DrawFn, kinds: tuple[str, ...] = ("gc", "srsgc", "msgc", "none")) -> tuple[int, Scheme]:
    """Workers, and a scheme for them with any parameters that are allowed; λ = n among them."""
    n, kind = draw(st.integers(4, 8)), draw(st.sampled_from(kinds))
    if kind == "none":
        return n, Uncoded()
    if kind == "gc":
        return n, GC(stragglers=draw(st.integers(0, n - 1)))
    burst = draw(st.integers(1, 3))
    if kind == "srsgc":
        return n, SRSGC(burst=burst, window=burst * draw(st.integers(1, 3)) + 1, stragglers=draw(st.integers(0, n)))
    return n, MSGC(burst=burst, window=burst + draw(st.integers(1, 2)), stragglers=draw(st.integers(0, n)))


def drawn(scheme: Scheme, n: int, seed: int, rule: str | None) -> list[Late]:
    """Random late workers of all rounds; with a rule, each round is waited out until the rule allows it."""
    rng, history = random.Random(seed), list[Late]()
    share = rng.choice([0.1, 0.3, 0.6])
    for _ in range(JOBS + scheme.delay()):
        busy = scheme.busy(n, JOBS, history)
        late = [worker for worker in range(n) if busy[worker] and rng.random() < share]
        rng.shuffle(late)
        allowed: Rule = {
            "conforms": lambda seen: scheme.conforms(n, seen),
            "tolerates_losses": lambda seen: scheme.tolerates_losses(n, JOBS, seen),
            None: lambda seen: True,
        }[rule]
        while not allowed([*history, frozenset(late)]):
            late.pop()
        history.append(frozenset(late))
    return history


def gradients(scheme: Scheme, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((JOBS, scheme.chunks(n), 3))


# ---- tolerated patterns


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["conforms", "tolerates_losses"])
@settings(max_examples=150)
@given(which=schemes(), seed=st.integers(0, 10**6))
def test_every_job_is_decoded_in_time(rule: str, which: tuple[int, Scheme], seed: int) -> None:
    n, scheme = which
    g = gradients(scheme, n, seed)
    found = decoded(scheme, n, JOBS, drawn(scheme, n, seed, rule), lambda job, chunk: g[job, chunk])
    assert len(found) == JOBS and all(value is not None for value in found)
    assert float(np.abs(np.array(found) - g.sum(axis=1)).max()) < 1e-9


@pytest.mark.slow
@settings(max_examples=150)
@given(which=schemes(), seed=st.integers(0, 10**6))
def test_beyond_the_tolerance_a_sum_is_right_or_absent(which: tuple[int, Scheme], seed: int) -> None:
    n, scheme = which
    g, history = gradients(scheme, n, seed), drawn(scheme, n, seed, None)
    found = decoded(scheme, n, JOBS, history, lambda job, chunk: g[job, chunk])
    for job, value in enumerate(found):
        assert (value is not None) == scheme.decodable(n, history[: job + scheme.delay() + 1], job)
        assert value is None or float(np.abs(value - g[job].sum(axis=0)).max()) < 1e-9


@pytest.mark.parametrize(
    ("scheme", "history"),
    [
        (Uncoded(), [{3}]),
        (GC(stragglers=1), [{0, 1}]),  # both of a group
        (GC(stragglers=2), [{0, 1, 2}]),
        (SRSGC(burst=1, window=2, stragglers=2), [{0, 1, 2}, {0, 1}]),
        (MSGC(burst=1, window=2, stragglers=2), [{0}, {0}]),  # one worker, twice
        (MSGC(burst=1, window=2, stragglers=2), [{0, 1}, {2}]),  # three within a window
        (MSGC(burst=2, window=3, stragglers=4), [{0}, {0}, {0}]),
    ],
)
def test_a_pattern_beyond_the_model_is_not_decoded(scheme: Scheme, history: list[set[int]]) -> None:
    n, seen = 4, [frozenset(late) for late in history]
    full = [*seen, *[NOBODY] * (1 + scheme.delay() - len(seen))]
    assert scheme.decode(n, full, 0) is None
    assert not scheme.tolerates_losses(n, JOBS, seen) and not scheme.conforms(n, seen)


@pytest.mark.slow
@settings(max_examples=100)
@given(which=schemes(("srsgc", "msgc", "gc")), seed=st.integers(0, 10**6))
def test_conforming_patterns_are_tolerated_and_others_lose_a_job(which: tuple[int, Scheme], seed: int) -> None:
    n, scheme = which
    history, rng = drawn(scheme, n, seed, "conforms"), random.Random(seed)
    assert all(scheme.tolerates_losses(n, JOBS, history[: now + 1]) for now in range(len(history)))
    history = drawn(scheme, n, seed, "tolerates_losses")
    now = rng.randrange(JOBS)
    busy = scheme.busy(n, JOBS, history[:now])
    seen = [*history[:now], frozenset(rng.sample([w for w in range(n) if busy[w]], min(n, rng.randint(1, 4))))]
    assume(not scheme.tolerates_losses(n, JOBS, seen))
    while len(seen) < JOBS + scheme.delay():
        seen.append(frozenset(worker for worker in range(n) if rng.random() < 0.1))
    ends = [seen[: job + scheme.delay() + 1] for job in range(JOBS)]
    assert not all(scheme.decodable(n, end, job) for job, end in enumerate(ends))


# ---- codes


@settings(max_examples=60)
@given(st.integers(3, 12), st.data())
def test_any_n_minus_s_workers_give_the_sum(n: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(0, n - 1))
    late = data.draw(st.sets(st.integers(0, n - 1), max_size=s))
    made, there = code(n, s), [worker for worker in range(n) if worker not in late]
    assert isinstance(made, RepetitionCode if n % (s + 1) == 0 else CyclicCode if n < 2 * (s + 1) else MixedCode)
    found = made.coefficients(there)
    assert found is not None and set(found) <= set(there)
    total = np.zeros(n)
    for worker, coefficient in found.items():
        assert len(made.row(worker)) == s + 1
        for chunk, weight in made.row(worker):
            total[chunk] += coefficient * weight
    assert float(np.abs(total - 1).max()) < 1e-9


@pytest.mark.parametrize(("m", "s"), [(3, 1), (5, 2), (7, 3), (8, 4), (8, 5), (15, 7)])
def test_a_cyclic_code_matches_its_construction(m: int, s: int) -> None:
    """Trigonometric polynomials of degree (m − s − 1)/2; for even m − s divided by one of them."""
    matrix, angles = encoding_matrix(m, s), 2 * np.pi * np.arange(m) / m
    degrees = np.arange((m - s) % 2 / 2 - 0.5 + 1, (m - s) / 2, 1.0)
    waves = [wave(degree * angles) for degree in degrees for wave in (np.cos, np.sin)]
    waves += [np.ones(m)] if (m - s) % 2 else []
    over = np.ones(m)
    if not (m - s) % 2:  # rows times some wave are waves: find it as the only one in both spaces
        k = max(range((m - s) // 2), key=lambda k: (np.gcd(2 * k + 1, m), k))
        d = int(np.gcd(2 * k + 1, m))
        over = np.cos((k + 0.5) * angles - np.pi * (d / (2 * m) - 0.5))
        assert float(np.abs(over).min()) == pytest.approx(np.sin(d * np.pi / (2 * m)))
    basis = np.array(waves)
    assert len(basis) == np.linalg.matrix_rank(matrix) == m - s
    assert np.linalg.matrix_rank(np.vstack([basis, matrix * over])) == m - s
    for i in range(m):
        assert set(np.flatnonzero(matrix[i])) == {(i + step) % m for step in range(s + 1)}
        assert np.abs(matrix[i]).sum() == pytest.approx(s + 1)
    fewer = matrix[: m - s - 1]
    rest = np.linalg.lstsq(fewer.T, np.ones(m), rcond=None)[0]
    assert float(np.abs(rest @ fewer - 1).max()) > 1e-3, "one fewer do not give the sum"
    assert code(m, s).coefficients(range(m - s - 1)) is None


@pytest.mark.parametrize(("n", "most"), [(3, 2), (4, 4), (5, 5), (6, 7), (7, 14), (8, 20), (10, 43)])
def test_rounding_errors_grow_no_more_than_stated(n: int, most: float) -> None:
    worst = 0.0
    for s in range(1, n):
        made, found = code(n, s), 0.0
        sizes = np.array([sum(abs(weight) for _, weight in made.row(worker)) for worker in range(n)])
        for late in itertools.combinations(range(n), s):
            parts = made.coefficients([worker for worker in range(n) if worker not in late])
            found = max(found, sum(abs(part) * sizes[worker] for worker, part in parts.items()) / n)
        assert found == pytest.approx(rounding_amplification(n, s), rel=1e-6)
        worst = max(worst, found)
    assert worst <= most


@pytest.mark.slow
def test_a_code_that_does_not_divide_is_repeated_in_part() -> None:
    made = code(11, 2)
    assert isinstance(made, MixedCode) and made.groups.workers == 6 and len(made.rest.matrix) == 5
    assert [sorted(chunk for chunk, _ in made.row(worker)) for worker in (0, 5, 6, 10)] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [6, 7, 10]
    ]  # fmt: skip
    assert (
        made.determines_sum([2, 4, 6, 7, 9])
        and not made.determines_sum(range(3, 11))
        and not made.determines_sum(range(8))
    )
    assert all(rounding_amplification(n, s) <= MAX_AMPLIFICATION for n in range(3, 300) for s in range(1, min(n, 5)))


@pytest.mark.parametrize(("n", "s"), [(4, 1), (6, 1), (6, 2), (8, 3)])
def test_fractional_repetition_is_exact_for_all_stragglers(n: int, s: int) -> None:
    draw = torch.Generator().manual_seed(n)
    g = torch.randn(n, 50, generator=draw) * torch.logspace(-3, 3, n).unsqueeze(1)
    sums = []
    for size in range(n):
        for late in itertools.combinations(range(n), size):
            value = decoded(GC(stragglers=s), n, 1, [frozenset(late)], lambda _, chunk: g[chunk])[0]
            alive = all(any(w not in late for w in range(at, at + s + 1)) for at in range(0, n, s + 1))
            assert (value is not None) == alive
            sums += [value] if value is not None else []
    assert len(sums) > n and all(torch.equal(value, sums[0]) for value in sums)


# ---- loads and prices


def test_loads_equal_the_published_ones() -> None:
    assert MSGC(burst=1, window=2, stragglers=27).load(256) == pytest.approx(0.007543, abs=1e-6)
    assert SRSGC(burst=2, window=3, stragglers=23).spare() == 12
    assert SRSGC(burst=2, window=3, stragglers=23).load(256) == pytest.approx(0.050781, abs=1e-6)
    assert GC(stragglers=15).load(256) == pytest.approx(0.0625, abs=1e-6)
    assert Uncoded().load(256) == pytest.approx(0.0039, abs=1e-5)
    assert [MSGC(burst=1, window=w, stragglers=s).chunks(8) for w, s in ((2, 1), (3, 3), (3, 8))] == [24, 72, 16]
    assert GC(stragglers=3).chunks(8) == SRSGC().chunks(8) == Uncoded().chunks(8) == 8


@pytest.mark.parametrize(("n", "most"), [(8, 1.31), (16, 1.46), (32, 1.59), (256, 1.83)])
def test_m_sgc_meets_the_bound_at_its_ends_and_is_above_it_between(n: int, most: float) -> None:
    worst = 0.0
    for window, late in itertools.product((2, 3, 4), range(n + 1)):
        burst = window - 1
        bound = Fraction(window - 1 + burst, n * (window - 1) + burst * (n - late))
        ratio = MSGC(burst=burst, window=window, stragglers=late).load(n) / float(bound)
        assert ratio == pytest.approx(1) if late >= n - 1 else ratio > 1 - 1e-12
        worst = max(worst, ratio)
    assert worst == pytest.approx(most, abs=0.005)


@settings(max_examples=100)
@given(schemes())
def test_a_round_is_its_load_in_equal_mini_tasks(which: tuple[int, Scheme]) -> None:
    n, scheme = which
    assert not scheme.why_unsupported(n) and scheme.load(n) <= 1 + 1e-12, "no load needs to be refused"
    full, quiet = scheme.load(n) * scheme.chunks(n), [NOBODY] * (scheme.delay() + 2)
    for worker, own in enumerate(scheme.tasks(n, 100, quiet)):
        sizes = {len(scheme.parts(n, worker, task)) for task in own}
        assert sizes == {round(full / scheme.slots())}
        unused = isinstance(scheme, MSGC) and scheme.stragglers == n
        assert len(own) == scheme.slots() - (scheme.burst if unused else 0)
    sent = [0] * n
    for now in range(scheme.delay() + 1):
        for worker, own in enumerate(scheme.tasks(n, 100, [NOBODY] * now)):
            sent[worker] += sum(task.sent for task in own if task.job == 0)
    coded = scheme.vectors() - (scheme.burst if isinstance(scheme, MSGC) and scheme.stragglers == n else 0)
    assert sent == [coded] * n


@settings(max_examples=60)
@given(which=schemes(("msgc", "srsgc")), seed=st.integers(0, 10**6))
def test_counting_mini_tasks_counts_them(which: tuple[int, Scheme], seed: int) -> None:
    n, scheme = which
    history = drawn(scheme, n, seed, "tolerates_losses")
    for now in range(len(history)):
        counted = [len(own) for own in scheme.tasks(n, JOBS, history[:now])]
        assert scheme.busy(n, JOBS, history[:now]) == counted


# ---- as a setting


@pytest.mark.parametrize(
    ("spec", "members", "complaint"),
    [
        ("mgsc", 8, r"exchange\.coded\.scheme = 'mgsc': no such choice; did you mean 'msgc'\?"),
        ({"burst": 1}, 8, "set scheme to one of gc, msgc, none, srsgc"),
        ("gc", 2, r"'gc' needs exchange\.replicas = 3 or more, not 2"),
        ({"scheme": "gc", "stragglers": 8}, 8, "stragglers = 8 leaves none of 8 replicas; use 7 or fewer"),
        ({"scheme": "msgc", "stragglers": 9}, 8, "stragglers = 9 is more than all 8 replicas; use 8 or fewer"),
        ({"scheme": "srsgc", "stragglers": 9}, 8, "stragglers = 9 is more than all 8 replicas"),
        ({"scheme": "msgc", "burst": 3, "window": 3}, 8, "burst = 3 is not below window = 3; use window = 4 or more"),
        ({"scheme": "srsgc", "burst": 3, "window": 3}, 8, "burst = 3 is not below window = 3"),
        ({"scheme": "srsgc", "burst": 2, "window": 4}, 8, "burst = 2 does not divide window − 1 = 3; use window = 5"),
        ({"scheme": "msgc", "window": 1}, 8, r"exchange\.coded\.window = 1"),
        ({"scheme": "msgc", "window": 65, "burst": 1}, 8, "at most 64: a job stays open for as many rounds"),
        ({"scheme": "gc", "stragglers": 15}, 31, "stragglers = 15 needs a code for 31 replicas.*use 14, or other"),
        ({"scheme": "msgc", "stragglers": 15}, 31, "stragglers = 15 needs a code for 31 replicas.*use 14, or other"),
        ({"scheme": "srsgc", "burst": 1, "window": 2, "stragglers": 30}, 31, "stragglers = 30 needs.*use 28, or"),
        ({"scheme": "gc", "window": 2}, 8, r"exchange\.coded\.window: no option of 'gc'"),
        ({"scheme": "gc", "stragglers": -1}, 8, r"exchange\.coded\.stragglers = -1"),
        ("gc", 1, r"'gc' needs exchange\.replicas = 3 or more, not 1"),
        ({"scheme": "gc", "slow": float("nan")}, 8, r"exchange\.coded\.slow = nan: use a multiple above 1"),
        ({"scheme": "gc", "jobs": 0}, 8, r"exchange\.coded\.jobs = 0: use 1 to 1024 jobs per step"),
        ({"scheme": "gc", "slow": 1.0}, 8, r"exchange\.coded\.slow = 1\.0: use a multiple above 1"),
        ({"scheme": "gc", "slow": "2"}, 8, r"exchange\.coded\.slow = '2'"),
        ({"scheme": "msgc", "stragglers": "auto"}, 8, "stragglers = 'auto'.*let `planaria advise RECIPE --delays RUN`"),
    ],
)
def test_invalid_settings_are_refused_by_name(spec: object, members: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_coded_schedule(spec, members)


def test_a_setting_becomes_a_scheme_and_requires_enough_microbatches() -> None:
    assert make_coded_schedule("none", 3) == CodedSchedule(Uncoded(), 1)
    made = make_coded_schedule({"scheme": "msgc", "burst": 1, "window": 3, "stragglers": 2, "jobs": 4, "slow": 3}, 8)
    assert made == CodedSchedule(MSGC(burst=1, window=3, stragglers=2), 4, 3.0)
    made = make_coded_schedule({"scheme": "msgc", "jobs": 4}, 8)  # 24 chunks a job of 8 replicas
    assert made.microbatch_divisor(8) == 12
    made.require(8, 24)
    with pytest.raises(UserError, match=r"8 replicas and jobs = 4 need pipeline\.microbatches.*of 12, not 25; use 36"):
        made.require(8, 25)
