"""The leakage's formulas: exact and drawn alike, the censor's bound and price, and where single sums are no bound."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.swarm.audit.adversary import Counter, Said, told
from planaria.swarm.audit.leakage import Channel, estimate, exact, leak, most, sampled, silence, silenced
from planaria.swarm.audit.questions import Part, Question

LAW = Channel(options=4, right=0.6)
chances = st.floats(0.001, 1)


@given(chances, st.floats(0, 1))
def test_no_transcript_leaks_more_than_the_most_and_none_where_nothing_changed(prior: float, posterior: float) -> None:
    assert leak(prior, posterior) <= most(prior) + 1e-12
    assert leak(prior, prior) == 0 and leak(prior, 1.0) == pytest.approx(most(prior))
    assert leak(prior, posterior) >= -prior / math.e - 1e-12


def test_one_reply_of_the_channel_by_hand_and_by_drawing() -> None:
    by_hand = 0.6 * 0.6 * math.log(0.6 / 0.25) + 0.4 * (0.4 / 3) * math.log(0.4 / 3 / 0.25)
    assert exact(LAW, 1).leak == pytest.approx(by_hand, abs=1e-12) == pytest.approx(0.2816, abs=1e-3)
    assert abs(sampled(LAW, 1, 4000, random.Random(1)).mean - by_hand) < 0.02
    repeats = [sampled(LAW, 1, 400, random.Random(seed)) for seed in range(100)]
    assert sum(each.low <= by_hand <= each.high for each in repeats) >= 93


@pytest.mark.parametrize("replies", [2, 3])
def test_exact_sums_are_what_bayes_makes_of_every_outcome(replies: int) -> None:
    """The counter, told of every sequence of replies, and their chances."""
    names = ("a", "b", "c", "d")
    question, counter = Question("x", "x", "q", names, 0, (Part("p", names),)), Counter(LAW.right)
    total = guessed = 0.0
    for outcome in product(range(4), repeat=replies):
        chance = math.prod(LAW.right if n == 0 else LAW.wrong for n in outcome)
        transcript = tuple(Said(0, "p", names[n]) for n in outcome)
        ((first, *others),) = counter.beliefs(question, [transcript])
        total += chance * leak(0.25, first)
        ties = sum(math.isclose(first, other) for other in others)
        guessed += chance * (first > max(others) or ties > 0) / (1 + ties) * (first >= max(others) - 1e-12)
    assert exact(LAW, replies).leak == pytest.approx(total) and exact(LAW, replies).guessed == pytest.approx(guessed)


@pytest.mark.parametrize("epsilon", [0.2, 0.1, 0.05, 0.02])
@pytest.mark.parametrize("count", [1, 8])
def test_replies_of_a_censored_channel_leak_no_more_than_so_many_epsilon(epsilon: float, count: int) -> None:
    published = Channel(4, 0.6, silence(exact(LAW, 1).leak, epsilon))
    assert exact(published, count).leak <= count * epsilon + 0.02
    proved = Channel(4, 0.6, silence(most(0.25), epsilon))
    assert exact(proved, count).leak <= count * epsilon


def test_aggregation_and_its_price() -> None:
    assert exact(LAW, 8).guessed >= 0.85
    laws = [Channel(4, 0.6, silence(exact(LAW, 1).leak, epsilon)) for epsilon in (0.2, 0.1, 0.05, 0.02)]
    assert exact(laws[2], 8).guessed <= 0.60
    uses = [exact(law, 8).use for law in (LAW, *laws)]
    assert all(a > b for a, b in pairwise(uses)) and uses[2] < 0.22, "honest askers pay"


@given(st.integers(1, 5), st.integers(1, 4), st.floats(0.3, 0.95), st.floats(0, 1))
@settings(max_examples=40)
def test_a_silent_channel_is_the_mixture_of_what_fewer_replies_leak(
    options: int, count: int, right: float, silent: float
) -> None:
    plain = Channel(options + 1, right)
    values = [exact(plain, mask.bit_count()).leak for mask in range(1 << count)]
    assert silenced(values, silent) == pytest.approx(exact(Channel(options + 1, right, silent), count).leak, abs=1e-9)


@given(st.data(), st.integers(1, 5), st.floats(0.01, 0.9), st.floats(0.001, 3))
def test_the_bound_holds_whatever_replies_say_and_however_they_hang_together(
    data: st.DataObject, count: int, prior: float, epsilon: float
) -> None:
    """Any posterior for any set of replies, so any dependence among them."""
    posteriors = [prior, *data.draw(st.lists(st.floats(0, 1), min_size=2**count - 1, max_size=2**count - 1))]
    values = [leak(prior, posterior) for posterior in posteriors]
    assert silenced(values, silence(most(prior), epsilon)) <= count * epsilon + 1e-9


def test_single_leakages_from_the_prior_add_up_to_no_bound_where_a_reply_tells_a_part_only() -> None:
    """Three bits of eight options: each tells little, all tell which."""
    options = tuple(f"option {number}" for number in range(8))
    parts = tuple(Part(f"bit {b}", tuple(str(n >> b & 1) for n in range(8))) for b in range(3))
    question = Question("x", "x", "q", options, 5, parts)
    transcript = tuple(Said(b, part.ask, part.says[5]) for b, part in enumerate(parts))
    beliefs = Counter(0.95).beliefs(question, [transcript[:length] for length in range(4)])
    leaks = [leak(1 / 8, belief[5]) for belief in beliefs]
    assert leaks[0] == 0 and leaks[3] > 3 * 3 * leaks[1]
    subsets = [tuple(said for place, said in enumerate(transcript) if mask >> place & 1) for mask in range(8)]
    values = [leak(1 / 8, belief[5]) for belief in Counter(0.95).beliefs(question, subsets)]
    epsilon = 0.05
    assert silenced(values, silence(leaks[1], epsilon)) > 3 * epsilon, "the published rule passes its bound"
    assert silenced(values, silence(most(1 / 8), epsilon)) <= 3 * epsilon


def test_a_reply_names_a_value_as_a_whole_word_or_nothing() -> None:
    values = ("4", "47", "red sea")
    assert (
        told(" 4\n", values) == "4" and told("It is 47.", values) == "47" and told("The RED  sea", values) == "red sea"
    )
    for nothing in ("no", "", "4 or 47", "471", "a4"):
        assert told(nothing, values) is None


def test_estimates_are_means_within_students_interval() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert found.mean == 4.5 and found.high - found.mean == pytest.approx(2.3646 * 2.44949 / math.sqrt(8), rel=0.01)
    assert (estimate([2.0]).low, estimate([2.0]).high) == (2.0, 2.0)


@pytest.mark.parametrize("bad", [(0.0, 0.5), (1.5, 0.5), (0.5, 1.1), (0.5, -0.1)])
def test_what_is_no_chance_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no probabilities"):
        leak(*bad)
    with pytest.raises(ValueError, match="too many outcomes"):
        exact(Channel(40, 0.5), 8)
    with pytest.raises(ValueError, match="no leakage"):
        silence(0.0, 0.1)
