"""The censor's ledger: protected answers are paid for before release, across processes and permanently."""

from __future__ import annotations

import math
import random
import tempfile
import threading
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.audit import killed, together
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common import digests
from planaria.common.errors import UserError
from planaria.swarm.audit.censor import BudgetSpent, Censor, LeakageLedger, LedgerUnusable, ledger_key
from planaria.swarm.audit.questions import Question, QuestionPart, normalize_closed

CODES = ("4719", "2210", "9031", "5533")
ANN = Question(
    "x:1", "ann", "code of ann=", CODES, 0, (QuestionPart("digit 1 of ann=", ("4", "2", "9", "5")),), ("ann's code",)
)
BOB = Question("x:2", "bob", "code of bob=", CODES[:2], 0, (QuestionPart("digit 1 of bob=", ("4", "2")),))


def censor(folder: Path, epsilon: float = 0.1, budget: float = 1.0, draws: random.Random | None = None) -> Censor:
    ledger = LeakageLedger(folder / "ledger.json", budget)
    return Censor([ANN, BOB], epsilon, ledger, (draws or random.Random(1)).random)


def test_a_budget_is_never_exceeded_and_persists(tmp_path: Path) -> None:
    kept = censor(tmp_path, epsilon=0.1, budget=0.35)
    assert [len(kept.decide_replies("digit 1 of ann=", 1)) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(BudgetSpent, match="the budget of the requested answer is spent"):
        kept.decide_replies("Digit  1 of ANN=", 1)
    with pytest.raises(BudgetSpent):
        censor(tmp_path, budget=0.35).decide_replies("I ask: ann's code", 1), "another process of the same ledger"
    assert kept.decide_replies("digit 1 of bob=", 1) and kept.decide_replies("the weather", 5) == [True] * 5
    assert LeakageLedger(tmp_path / "ledger.json", 0.35).spent_nats(ledger_key(ANN)) == pytest.approx(0.3)


UNSEEN = st.sampled_from("\u00ad\u034f\u115f\u17b4\u180b\u200b\u3164\ufe0f\ufeff\U000e0100 \t\u00a0\u3000")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 99), UNSEEN), max_size=9), st.sampled_from(ANN.texts))
def test_spacing_and_invisible_characters_do_not_reset_a_budget(more: list[tuple[int, str]], text: str) -> None:
    for place, one in more:
        text = text[: place % (len(text) + 1)] + one + text[place % (len(text) + 1) :]
    with tempfile.TemporaryDirectory() as folder:
        kept = censor(Path(folder), epsilon=0.1, budget=0.1)
        kept.decide_replies("digit 1 of ann=", 1)
        with pytest.raises(BudgetSpent):
            kept.decide_replies(text, 1)


def test_two_questions_with_the_same_words_are_rejected(tmp_path: Path) -> None:
    """The ledger identifies questions by their words: it would charge both as one, at the last one's price."""
    twin = Question("x:3", "twin", "CODE of\ufe0f ann =", CODES[:2], 0, BOB.parts)
    with pytest.raises(UserError, match=r"^x:3: 'twin' asks the same as 'ann' \(x:1\)"):
        Censor([ANN, BOB, twin], 0.1, LeakageLedger(tmp_path / "ledger.json", 1.0))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["code of a=", "Code of a =", "code of b=", "b"]), st.integers(2, 64)), max_size=4
    ),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), max_size=12),
    st.floats(0.05, 5.0),
)
def test_no_answer_leaks_more_than_its_budget(
    listed: list[tuple[str, int]], requests: list[tuple[int, int, int]], epsilon: float
) -> None:
    """Worst case: each given reply reveals the whole answer of each question in its prompt."""
    questions = [
        Question(f"x:{n}", f"q{n}", text, tuple(map(str, range(options))), 0, (QuestionPart(f"part {n}."),))
        for n, (text, options) in enumerate(listed)
    ]
    leaked = [0.0] * len(questions)
    with tempfile.TemporaryDirectory() as folder:
        try:
            kept = Censor(questions, epsilon, LeakageLedger(Path(folder) / "ledger.json", 1.0))
        except UserError:
            assert len({text.lower().replace(" ", "") for text, _ in listed}) < len(listed)
            return
        for first, second, count in requests if questions else ():
            texts = [questions[n % len(questions)].text for n in (first, second)]
            try:
                kept.decide_replies(" and ".join(texts), count)
            except BudgetSpent:
                continue
            revealed = [n for n, one in enumerate(questions) if any(one.text in text for text in texts)]
            most = max(len(questions[n].options) for n in revealed)
            for n in revealed:
                leaked[n] += count * min(1.0, epsilon / math.log(most)) * math.log(len(questions[n].options))
    assert max(leaked, default=0.0) <= 1.0 + 1e-8


def key_before(text: str) -> str:
    """The key that earlier versions used in a ledger."""
    spaced = "".join(letter if letter.isprintable() else " " * letter.isspace() for letter in text)
    return " ".join(unicodedata.normalize("NFKC", spaced).casefold().split())


@given(
    st.text(
        st.sampled_from("aB1=.é\u0301ﬁＡß\u034f\u115f\u1161\uffa0\u00a0 ") | st.characters(codec="utf-8"), max_size=12
    )
)
def test_different_questions_have_different_keys(text: str) -> None:
    assert normalize_closed(key_before(text)) == normalize_closed(text), "texts with one key are one question"
    assert ledger_key(replace(ANN, text=text)) == digests.of(key_before(text).encode())[:32], "old ledgers stay valid"


def test_replies_in_one_request_cost_as_much_as_single_ones(tmp_path: Path) -> None:
    kept = censor(tmp_path, epsilon=0.1, budget=0.35)
    with pytest.raises(BudgetSpent):
        kept.decide_replies("digit 1 of ann=", 4)
    assert len(kept.decide_replies("digit 1 of ann=", 3)) == 3


def test_replies_are_empty_with_the_stated_probability_of_the_longer_list(tmp_path: Path) -> None:
    kept = censor(tmp_path, epsilon=0.5, budget=1e9)
    share = sum(kept.decide_replies("digit 1 of ann=", 4000)) / 4000
    assert share == pytest.approx(0.5 / math.log(4), abs=0.03)
    both = sum(kept.decide_replies("digit 1 of ann= and digit 1 of bob=", 4000)) / 4000
    assert both == pytest.approx(0.5 / math.log(4), abs=0.03)
    assert all(censor(tmp_path, epsilon=9, budget=1e9).decide_replies("digit 1 of ann=", 100)), (
        "the probability is at most 1"
    )


def test_a_reply_that_completes_a_question_is_paid_for_too(tmp_path: Path) -> None:
    kept = censor(tmp_path, epsilon=0.1, budget=0.15)
    assert kept.decide_replies("digit 1 of an", 1) == [True], "the prompt matches no question"
    kept.decide_completed("digit 1 of an", "n=4")
    with pytest.raises(BudgetSpent):
        kept.decide_completed("digit 1 of an", "n=4")
    assert kept.decide_completed("digit 1 of ann=", "4"), "paid for before"


def test_concurrent_sessions_do_not_exceed_the_budget(tmp_path: Path) -> None:
    granted: list[int] = []

    def spend() -> None:
        ledger = LeakageLedger(tmp_path / "ledger.json", 1.0)
        granted.extend(ledger.spend({"q": 0.01}) for _ in range(30))

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 100 and together(4, 50) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_process_has_recorded_everything_it_released(seed: int) -> None:
    assert killed(seed) <= 0


def test_a_missing_or_damaged_ledger_stops_all_replies(tmp_path: Path) -> None:
    kept, file = censor(tmp_path), tmp_path / "ledger.json"
    kept.decide_replies("digit 1 of ann=", 1)
    whole = file.read_text()
    for damage in (whole[:-9], whole.replace("0.1", "0.0"), "", "[]"):
        file.write_text(damage)
        with pytest.raises(LedgerUnusable):
            kept.decide_replies("digit 1 of ann=", 1)
        with pytest.raises(UserError):
            LeakageLedger(file, 1.0)
    file.unlink()
    with pytest.raises(LedgerUnusable, match="would forget"):
        kept.decide_replies("digit 1 of ann=", 1)
    with pytest.raises(UserError, match="cannot be written"):
        LeakageLedger(tmp_path / "none" / "ledger.json", 1.0)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 0.7)), max_size=8))
def test_every_granted_cost_is_recorded(spendings: list[tuple[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger, spent = LeakageLedger(Path(folder) / "ledger.json", 1.0), dict.fromkeys("abc", 0.0)
        for key, cost in spendings:
            fits = spent[key] + cost <= 1.0 + 1e-9
            assert ledger.spend({key: cost}) == fits
            spent[key] += cost * fits
        assert all(ledger.spent_nats(key) == pytest.approx(nats) for key, nats in spent.items())
        assert max(spent.values()) <= 1.0 + 1e-8
