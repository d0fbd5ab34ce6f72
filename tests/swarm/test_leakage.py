"""Leakage of protected questions: formulas, question files, and a model with planted secrets."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks.audit import QUESTION, ReplyChannel, exact, planted, refusals, sampled
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.audit.leakage import censored_mean, estimate, leak, max_leakage, silence_probability
from planaria.swarm.audit.leakage_measurement import Counter, Turn, stated_value
from planaria.swarm.audit.questions import (
    INVISIBLE,
    Question,
    QuestionPart,
    normalize,
    normalize_closed,
    parts_to_ask,
    read_questions,
)
from support.command_line import refused

LAW = ReplyChannel(options=4, right=0.6)
chances = st.floats(0.001, 1)


@given(chances, st.floats(0, 1))
def test_leakage_is_bounded_and_zero_without_change(prior: float, posterior: float) -> None:
    assert leak(prior, posterior) <= max_leakage(prior) + 1e-12
    assert leak(prior, prior) == 0 and leak(prior, 1.0) == pytest.approx(max_leakage(prior))
    assert leak(prior, posterior) >= -prior / math.e - 1e-12


def test_leakage_of_one_reply_matches_hand_and_sampling() -> None:
    by_hand = 0.6 * 0.6 * math.log(0.6 / 0.25) + 0.4 * (0.4 / 3) * math.log(0.4 / 3 / 0.25)
    assert exact(LAW, 1).leak == pytest.approx(by_hand, abs=1e-12) == pytest.approx(0.2816, abs=1e-3)
    assert abs(sampled(LAW, 1, 4000, random.Random(1)).mean - by_hand) < 0.02
    repeats = [sampled(LAW, 1, 400, random.Random(seed)) for seed in range(100)]
    assert sum(each.low <= by_hand <= each.high for each in repeats) >= 93


@pytest.mark.parametrize("replies", [2, 3])
def test_exact_sums_match_bayes_over_all_outcomes(replies: int) -> None:
    """The counter over every sequence of replies, weighted by their probabilities."""
    names = ("a", "b", "c", "d")
    question, counter = Question("x", "x", "q", names, 0, (QuestionPart("p", names),)), Counter(LAW.right)
    total = guessed = 0.0
    for outcome in product(range(4), repeat=replies):
        chance = math.prod(LAW.right if n == 0 else LAW.wrong for n in outcome)
        transcript = tuple(Turn(0, "p", names[n]) for n in outcome)
        ((first, *others),) = counter.beliefs(question, [transcript])
        total += chance * leak(0.25, first)
        ties = sum(math.isclose(first, other) for other in others)
        guessed += chance * (first > max(others) or ties > 0) / (1 + ties) * (first >= max(others) - 1e-12)
    assert exact(LAW, replies).leak == pytest.approx(total) and exact(LAW, replies).guessed == pytest.approx(guessed)


@given(st.integers(1, 5), st.integers(1, 4), st.floats(0.3, 0.95), st.floats(0, 1))
@settings(max_examples=40)
def test_a_silent_channel_is_a_mixture_of_fewer_replies(options: int, count: int, right: float, silent: float) -> None:
    normalize = ReplyChannel(options + 1, right)
    values = [exact(normalize, mask.bit_count()).leak for mask in range(1 << count)]
    assert censored_mean(values, silent) == pytest.approx(
        exact(ReplyChannel(options + 1, right, silent), count).leak, abs=1e-9
    )


@pytest.mark.slow
@given(st.data(), st.integers(1, 5), st.floats(0.01, 0.9), st.floats(0.001, 3))
def test_the_bound_holds_for_dependent_replies(data: st.DataObject, count: int, prior: float, epsilon: float) -> None:
    """Any posterior for any set of replies, so any dependence among them."""
    posteriors = [prior, *data.draw(st.lists(st.floats(0, 1), min_size=2**count - 1, max_size=2**count - 1))]
    values = [leak(prior, posterior) for posterior in posteriors]
    assert censored_mean(values, silence_probability(max_leakage(prior), epsilon)) <= count * epsilon + 1e-9


def test_single_leakages_do_not_bound_partial_replies() -> None:
    """Three bits of eight options: each reveals little, all three reveal the option."""
    options = tuple(f"option {number}" for number in range(8))
    parts = tuple(QuestionPart(f"bit {b}", tuple(str(n >> b & 1) for n in range(8))) for b in range(3))
    question = Question("x", "x", "q", options, 5, parts)
    transcript = tuple(Turn(b, part.ask, part.right_replies[5]) for b, part in enumerate(parts))
    beliefs = Counter(0.95).beliefs(question, [transcript[:length] for length in range(4)])
    leaks = [leak(1 / 8, belief[5]) for belief in beliefs]
    assert leaks[0] == 0 and leaks[3] > 3 * 3 * leaks[1]
    subsets = [tuple(turn for place, turn in enumerate(transcript) if mask >> place & 1) for mask in range(8)]
    values = [leak(1 / 8, belief[5]) for belief in Counter(0.95).beliefs(question, subsets)]
    epsilon = 0.05
    assert censored_mean(values, silence_probability(leaks[1], epsilon)) > 3 * epsilon, (
        "the published rule passes its bound"
    )
    assert censored_mean(values, silence_probability(max_leakage(1 / 8), epsilon)) <= 3 * epsilon


def test_a_reply_names_a_value_as_a_whole_word() -> None:
    values = ("4", "47", "red sea")
    assert (
        stated_value(" 4\n", values) == "4"
        and stated_value("It is 47.", values) == "47"
        and stated_value("The RED  sea", values) == "red sea"
    )
    for nothing in ("no", "", "4 or 47", "471", "a4"):
        assert stated_value(nothing, values) is None


def test_estimates_have_students_interval() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert found.mean == 4.5 and found.high - found.mean == pytest.approx(2.3646 * 2.44949 / math.sqrt(8), rel=0.01)
    assert (estimate([2.0]).low, estimate([2.0]).high) == (2.0, 2.0)


@pytest.mark.parametrize("bad", [(0.0, 0.5), (1.5, 0.5), (0.5, 1.1), (0.5, -0.1)])
def test_invalid_probabilities_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no probabilities"):
        leak(*bad)
    with pytest.raises(ValueError, match="too many outcomes"):
        exact(ReplyChannel(40, 0.5), 8)
    with pytest.raises(ValueError, match="no leakage"):
        silence_probability(0.0, 0.1)


def written(folder: Path, *questions: dict[str, Any]) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions))
    return file


def test_a_question_file_is_read(tmp_path: Path) -> None:
    other = QUESTION | {"question": "What is the code of Bob?", "paraphrases": []}
    first, second = read_questions(written(tmp_path, QUESTION, {k: v for k, v in other.items() if k != "name"}))
    assert first.name == "one" and second.name.endswith("questions.jsonl:2")
    assert first.options[first.answer] == "4719" and first.parts[0].right_replies[first.answer] == "4"
    assert first.parts[1].right_replies == () and len(first.texts) == 4
    assert parts_to_ask([first, second], None, 8) == 2 and parts_to_ask([first], 1, 8) == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"answer": "1"}, "options lack the answer '1'"),
        ({"options": ["4719"]}, "there are 1 options; list two or more"),
        ({"options": ["4719", "2210", " 4719"]}, "options have ' 4719' twice"),
        ({"parts": ["What is  the CODE of Ann?"]}, "repeats the question"),
        ({"parts": []}, "parts are empty"),
        ({"parts": [{"ask": "x", "says": ["1"]}]}, "needs a reply for each of 4 options"),
        ({"parts": [{"said": 1}]}, "a part is a text, or"),
        ({"parts": "x"}, "'parts' is not a list"),
        ({"paraphrases": [1]}, "paraphrases has 1, not a text"),
        ({"hint": "x"}, "unknown field 'hint'"),
        ({"question": " \u200b"}, "question has"),
        ({"name": 3}, "field 'name' holds int"),
        ({"options": [str(n) for n in range(65)]}, "options has 65 entries; the limit is 64"),
    ],
)
def test_invalid_questions_are_reported_with_their_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    file = written(tmp_path, QUESTION | {"name": "two"}, QUESTION | changes)
    with pytest.raises(UserError) as error:
        read_questions(file)
    assert str(error.value).startswith(f"{file}:2: ") and line in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"question": "what\u3164 is the code of  ANN ?", "paraphrases": []},
        {"question": "Ann's c\u00adode , please", "paraphrases": []},
        {"question": "Which?", "paraphrases": ["Ann's\ufe0fcode,please"]},
    ],
)
def test_duplicate_questions_are_refused_with_both_places(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = written(tmp_path, QUESTION, QUESTION | {"name": "two"} | changes)
    with pytest.raises(UserError) as error:
        read_questions(file)
    assert str(error.value).startswith(f"{file}:2: 'two' asks the same as 'one' ({file}:1); ")


@pytest.mark.slow
def test_damaged_files_give_one_line_errors() -> None:
    kept, refused, others = refusals(1000, random.Random(1))
    assert others == 0 and refused > 800 and kept + refused == 1000


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    return refused(capsys, "swarm", "audit", "no-such-model", *words)


@pytest.mark.slow
def test_mistakes_are_reported_before_opening_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bare = written(tmp_path, QUESTION), tmp_path / "bare.jsonl"
    bare.write_text(json.dumps(QUESTION | {"options": ["4719"]}) + "\n")
    assert "there are 1 options; list two or more" in mistake(capsys, "--questions", bare)
    assert "--k 9: " in mistake(capsys, "--questions", good, "--k", 9)
    assert "--k 0: use 1 or more" in mistake(capsys, "--questions", good, "--k", 0)
    for epsilon in ("0", "-1", "nan"):
        assert "must be above 0" in mistake(capsys, "--questions", good, "--censor", epsilon)
    assert "does not list the reply implied by each option" in mistake(
        capsys, "--questions", good, "--adversary", "counter"
    )
    assert "not a probability in (0, 1)" in mistake(capsys, "--questions", good, "--adversary", "counter:2")
    assert "not a probability; use" in mistake(capsys, "--questions", good, "--adversary", "counter:x")
    assert "--k requires --questions" in mistake(capsys, "--k", 2)
    assert "--censor requires --questions" in mistake(capsys, "--censor", 0.1)
    assert "there are no problems; pass --run" in mistake(capsys, "--watch", "text")
    assert "--max-success must be" in mistake(capsys, "--max-success", 1)
    assert "no such run, folder or file" in mistake(capsys)
    assert "no such run, folder or file" in mistake(capsys, "--questions", good)
    assert "remove --peer" in mistake(capsys, "--peer", "p0")


def test_invisible_differences_are_ignored() -> None:
    assert normalize("What  is\nＴＨＥ code\u200b?") == normalize(" what is the code?")
    assert normalize("digit 1") != normalize("digit 2") and normalize("1 2") != normalize("12")
    assert normalize("a =") == normalize("a\u180b = ") == "a=" and normalize("\u115f\u17b4") == ""


def test_invisible_characters_match_unicode() -> None:
    standard = pytest.importorskip("regex").compile(r"\p{Default_Ignorable_Code_Point}")
    every = "".join(map(chr, range(0x110000)))
    assert INVISIBLE.findall(every) == standard.findall(every)


UNSEEN = st.sampled_from(
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b\u200b\u200d\u2060\u3164\ufe0f\ufeff\uffa0\U000e0100\x00"
)
SPACES = st.sampled_from(" \t\n\x1f\x85\u00a0\u2003\u2028\u202f\u3000")
TEXTS = st.text(st.sampled_from("aB1=.é\u0301ﬁＡß漢\u1100\u1161 ") | st.characters(codec="utf-8"), max_size=12)


def inserted(text: str, more: Sequence[tuple[int, str]]) -> str:
    for place, one in more:
        text = text[: place % (len(text) + 1)] + one + text[place % (len(text) + 1) :]
    return text


@pytest.mark.slow
@given(TEXTS, st.lists(st.tuples(st.integers(0, 99), UNSEEN), max_size=6))
def test_no_invisible_character_changes_a_normal_form(text: str, more: list[tuple[int, str]]) -> None:
    assert normalize(inserted(text, more)) == normalize(text) == normalize(normalize(text))


@given(TEXTS, st.lists(st.tuples(st.integers(0, 99), UNSEEN | SPACES), max_size=6))
def test_spacing_does_not_hide_a_question(text: str, more: list[tuple[int, str]]) -> None:
    assert normalize_closed(inserted(text, more)) == normalize_closed(text) == normalize_closed(normalize_closed(text))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forty_codes_leak_in_parts_until_parts_are_refused() -> None:
    found = planted(seed=1, steps=400, reads=False)
    assert found["counter, single prompt: guessed"] <= 0.25 + 0.05
    assert found["counter, 4 parts: guessed"] >= 0.9
    assert found["audit's exit code"] == 1 and found["secrets that the audit names"] >= 36
    assert found["repaired: audit's exit code"] == 0 and found["repaired: IIL of the worst"] <= 0.1
    assert found["behind the wrapper, ε .1: IIL of the worst"] <= 4 * 0.1
