"""Conversion of peers' messages to completions."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Completion, ProblemCompletions, Rollouts
from planaria.swarm.checks.defence import PeerAccounts
from planaria.swarm.peer.completion_intake import CompletionIntake, RoundAllowance, Scoring
from planaria.swarm.peer.rollout import PromptedProblem, Rollout, prompt_for
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.records.lines import UNKNOWN_PEERS, SampleRecord
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.tiny_swarm import policy, reading

TASK = Sums()
END = 256
MAX_NEW = 40


@dataclass(frozen=True)
class Sender:
    peer: str
    tokenizer: str

    def message_with(self, *groups: tuple[int, list[Completion]]) -> dict[str, Rollouts]:
        made = tuple(ProblemCompletions(problem=problem, completions=tuple(texts)) for problem, texts in groups)
        message = Rollouts(run="0" * 32, peer=self.peer, round=0, tokenizer=self.tokenizer, weights="", groups=made)
        return {self.peer: message}


@pytest.fixture(scope="module")
def reader() -> LlamaPolicy:
    return policy(vocab=260)


@pytest.fixture
def alike(reader: LlamaPolicy) -> Sender:
    return Sender(PeerIdentity.generate().peer, reader.tokenizer_fingerprint)


@pytest.fixture
def foreign() -> Sender:
    return Sender(PeerIdentity.generate().peer, "0123456789abcdef")


def solved(number: int) -> str:
    return TASK.solution(TASK.problem(number), random.Random(0))


def admitted(
    reader: LlamaPolicy, messages: dict[str, Rollouts], weights: str = ""
) -> tuple[list[Rollout], list[SampleRecord]]:
    schedule = RoundAllowance(frozenset(range(10)), TASK.training, 10, 4)

    def prompt_of(number: int) -> PromptedProblem:
        return prompt_for(TASK.problem(number), reader)

    return CompletionIntake(schedule, Scoring(TASK), reader, MAX_NEW, prompt_of, {0: weights}).admit(messages)


def one(reader: LlamaPolicy, messages: dict[str, Rollouts]) -> Rollout:
    (sample,), rejections = admitted(reader, messages)
    assert not rejections
    return sample


def test_completions_keep_ids_and_claims_and_get_our_score(reader: LlamaPolicy, alike: Sender) -> None:
    text = solved(3)
    ids = (*text.encode(), END)
    logps = tuple(-0.01 * n for n in range(len(ids)))
    found = one(reader, alike.message_with((3, [Completion(text=text, ended=True, ids=ids, logps=logps)])))
    assert found == Rollout(*prompt_for(TASK.problem(3), reader), text, ids, True, logps, peer=alike.peer, reward=1.0)


@pytest.mark.parametrize(
    "ids",
    [
        (*b"7+5=13", END),  # another text
        (*b"7+5=12",),  # an end that is not there
        (*b"7+5", END, *b"=12", END),  # an end in the middle
        (*b"7+5=12", 70_000, END),  # beyond the vocabulary
        (*b"7+5=12", 258, END),  # a row of the model's that no text has
        (END,),
        (),
    ],
)
def test_ids_that_differ_from_the_text_are_replaced(reader: LlamaPolicy, alike: Sender, ids: tuple[int, ...]) -> None:
    claims = tuple(-1.0 for _ in ids)
    found = one(reader, alike.message_with((3, [Completion(text="7+5=12", ended=True, ids=ids, logps=claims)])))
    assert found.ids == (*b"7+5=12", END) and found.logps is None


def test_invalid_utf8_is_kept_as_drawn(reader: LlamaPolicy, alike: Sender) -> None:
    ids = (200, 49, END)
    found = one(reader, alike.message_with((3, [Completion(text=reader.decode(ids), ended=True, ids=ids)])))
    assert found.ids == ids and found.logps is None and found.claimed is None


def test_foreign_tokens_are_retokenized_with_a_sequence_claim(reader: LlamaPolicy, foreign: Sender) -> None:
    text = solved(3)
    found = one(reader, foreign.message_with((3, [Completion(text=text, ended=True, ids=(5, 6), logps=(-1.5, -0.5))])))
    assert found.ids == (*text.encode(), END) and found.logps is None and found.claimed == -2.0
    assert found.reward == 1.0


def test_unfinished_completions_have_no_end_and_score_zero(reader: LlamaPolicy, alike: Sender) -> None:
    text = solved(3).rjust(MAX_NEW, "x")
    found = one(reader, alike.message_with((3, [Completion(text=text, ended=False, ids=tuple(text.encode()))])))
    assert found.ids == tuple(text.encode()) and found.reward == 0.0 and not found.ended


def test_unfinished_completions_must_reach_the_limit(reader: LlamaPolicy, alike: Sender, foreign: Sender) -> None:
    short = [Completion(text="7+5=12", ended=False)]
    samples, (rejection,) = admitted(reader, alike.message_with((3, short)))
    assert not samples and rejection.reason == f"it ended early, after 6 of {MAX_NEW} tokens"
    assert one(reader, foreign.message_with((3, short))).ids == tuple(b"7+5=12")  # who knows how long its tokens are


def test_empty_and_too_long_completions_are_rejected(reader: LlamaPolicy, alike: Sender) -> None:
    texts = ["x" * (MAX_NEW - 1), "x" * MAX_NEW, ""]
    sent = [Completion(text=text, ended=True) for text in texts] + [Completion(text="", ended=False)]
    samples, rejections = admitted(reader, alike.message_with((3, sent)))
    assert [sample.index for sample in samples] == [0, 2]
    assert [(entry.index, entry.reason) for entry in rejections] == [
        (1, "41 tokens; it must have from 1 to 40"),
        (3, "0 tokens; it must have from 1 to 40"),
    ]


def test_a_completion_fits_into_the_context_after_its_prompt(alike: Sender) -> None:
    small = policy(vocab=260, context=16)
    prompt = len(TASK.problem(3).prompt)
    sent = [Completion(text="x" * n, ended=False) for n in (16 - prompt, 17 - prompt)]
    samples, rejections = admitted(small, alike.message_with((3, sent)))
    assert [sample.index for sample in samples] == [0] and [entry.index for entry in rejections] == [1]


def test_unscheduled_completions_are_rejected(reader: LlamaPolicy, alike: Sender) -> None:
    text = Completion(text="1", ended=True)
    samples, rejections = admitted(reader, alike.message_with((3, [text] * 5), (70, [text])))
    assert len(samples) == 4
    assert {(entry.problem, entry.index) for entry in rejections} == {(3, 4), (70, 0)}


def test_order_is_independent_of_arrival(reader: LlamaPolicy) -> None:
    messages = {}
    for _ in range(3):
        sender = Sender(PeerIdentity.generate().peer, reader.tokenizer_fingerprint)
        groups = [(problem, [Completion(text=f"{n}", ended=True) for n in range(5)]) for problem in (7, 2, 99)]
        messages |= sender.message_with(*groups)
    found = [admitted(reader, dict(order)) for order in itertools.permutations(messages.items())]
    assert all(entry == found[0] for entry in found)
    names = [(sample.problem.number, sample.peer, sample.index) for sample in found[0][0]]
    assert names == sorted(names)


def test_a_sequence_claim_gives_the_geometric_mean_ratio() -> None:
    read = reading([-1.0, -0.5, -3.0])
    made = Rollout(TASK.problem(0), (), "abc", (1, 2, 3), True, claimed=-6.0)
    claims = np.array(made.with_reading(read).logps)
    assert np.allclose(read.logps - claims, (-4.5 + 6.0) / 3)
    assert claims.sum() == pytest.approx(-6.0)


def test_a_sample_without_a_sequence_claim_is_unchanged() -> None:
    read = reading([-1.0] * 3)
    made = Rollout(TASK.problem(0), (), "abc", (1, 2, 3), True, (-1.0, -1.0, -1.0))
    assert made.with_reading(read) == replace(made, reading=read)
    assert replace(made, logps=None).with_reading(read).logps is None


@pytest.mark.parametrize(("weights", "alike_"), [("ab" * 8, True), ("cd" * 8, False), ("", False)])
def test_equal_weights_are_recognized_by_fingerprint(
    reader: LlamaPolicy, alike: Sender, foreign: Sender, weights: str, alike_: bool
) -> None:
    text = Completion(text="1", ended=True, ids=(49, END), logps=(-1.0, -1.0))
    for sender, own in ((alike, True), (foreign, False)):
        messages = {p: m.model_copy(update={"weights": weights}) for p, m in sender.message_with((3, [text])).items()}
        for mine in ("ab" * 8, ""):
            ((found,), _) = admitted(reader, messages, mine)
            assert found.declares_same_weights == (alike_ and own and mine != "")


def flooded(reader: LlamaPolicy) -> tuple[list[Rollout], list[str], list[SampleRecord]]:
    """Take in the messages of four known and four hundred unknown peers, each of maximum size."""
    senders = [Sender(PeerIdentity.generate().peer, reader.tokenizer_fingerprint) for _ in range(404)]
    messages: dict[str, Rollouts] = {}
    for sender in senders:
        messages |= sender.message_with((3, [Completion(text=f"{n}", ended=True) for n in range(4)]))
    known = [sender.peer for sender in senders[:4]]
    accounts = PeerAccounts(known, 4, 8, seed=1).record_senders(0, messages.keys())
    schedule = RoundAllowance(frozenset({3}), TASK.training, 1, 4)
    prompt_of = prompt_for(TASK.problem(3), reader)
    intake = CompletionIntake(schedule, Scoring(TASK), reader, MAX_NEW, lambda _: prompt_of, {}, accounts)
    samples, rejections = intake.admit(messages)
    return samples, known, rejections


def test_unknown_peers_share_one_schedule_account(reader: LlamaPolicy) -> None:
    samples, known, rejections = flooded(reader)
    unknown = [sample for sample in samples if sample.peer not in known]
    assert len(samples) == 5 * 4 and len(unknown) == 4 == len({sample.peer for sample in unknown})
    assert {sample.effective_account for sample in unknown} == {UNKNOWN_PEERS}
    assert {entry.reason for entry in rejections} == {"more than 4 completions of one problem, all newcomers together"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_endless_programs_use_up_only_their_peers_time(reader: LlamaPolicy) -> None:
    clock = Clock()

    class Slow(Sums):
        def score(self, problem: TaskProblem, completion: str) -> float:
            clock.now += 5.0 if completion == "endless" else 0.01
            return 1.0

    scoring = Scoring(Slow(), clock)
    one_, other = Sender("0" * 32, reader.tokenizer_fingerprint), Sender("f" * 32, reader.tokenizer_fingerprint)
    endless = [Completion(text="endless", ended=True)] * 48
    spent = []
    for _ in range(6):
        scoring.begin()
        before = clock.now
        messages = one_.message_with((3, endless)) | other.message_with((3, [Completion(text="1", ended=True)] * 48))
        schedule = RoundAllowance(frozenset({3}), TASK.training, 1, 48)
        intake = CompletionIntake(schedule, scoring, reader, MAX_NEW, lambda n: prompt_for(TASK.problem(n), reader))
        samples, rejections = intake.admit(messages)
        spent.append(clock.now - before)
        assert sum(sample.peer == other.peer for sample in samples) == 48
        assert rejections and all("to score" in entry.reason for entry in rejections)
    assert spent == pytest.approx([30.48, 15.48, 10.48, 5.48, 5.48, 5.48]), "of 240 s that they would take"
    scoring.begin()
    scoring.begin()
    assert scoring.time_limit_s(one_.peer) == 3.75, "it is given time again when it did not use it up"
