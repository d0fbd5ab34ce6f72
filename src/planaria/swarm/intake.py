"""From peers' messages to completions: read with our own tokenizer, scored by our own ground truth."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planaria.swarm.board.message import Completion, Rollouts
from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Reading
from planaria.swarm.rollout import Asked, Asking, Rollout
from planaria.swarm.tasks.base import Behaviour, Problem, Task, as_reward

NOTHING: Mapping[tuple[str, int, int], float] = {}

SECONDS = 30.0
"""for all that one peer, or all strangers together, sent for a round"""
LEAST = 1 / 16
"""of them, for a peer that used them up again and again"""


class Scored(NamedTuple):
    """What a completion is worth, as far as that can be told of it alone."""

    reward: float = 0.0
    """by the task's own score; 0 where peers vote instead"""
    behaviour: Behaviour = ()
    """what it does, where peers vote on that"""


class Scoring:
    """Scores completions within each account's time, which is halved when it was used up and doubled when it was not.

    Time depends on the machine: peers with equal weights drift apart where one ran out of it and another did not, as
    they do where a program's own limit is near.
    """

    def __init__(
        self, task: Task, clock: Callable[[], float] = time.monotonic, config: SwarmConfig | None = None
    ) -> None:
        """``config``: says whether peers vote; they do not, unless given."""
        self._task, self._clock, self._draw = task, clock, 0
        self._voting = config is not None and config.task.reward == CONSENSUS
        self._filtering = config is not None and config.defence.consensus
        self._part: dict[str, float] = defaultdict(lambda: 1.0)
        self._used: dict[str, float] = defaultdict(float)
        self._given = NOTHING
        self.rewards: dict[tuple[str, int, int], float] = {}
        """(peer, problem, index) → reward, of this round"""
        self.flawed: dict[str, str] = {}
        """peer → why the first flawed reward of its completions in this round is one"""

    @property
    def votes(self) -> bool:
        """Whether peers vote on anything."""
        return self._voting or self._filtering

    def begin(self, given: Mapping[tuple[str, int, int], float] = NOTHING, draw: int = 0) -> None:
        """A round begins. ``given`` are rewards that need not be found again; ``draw``: a number that nobody knew when
        its completions were written."""
        self._given, self.rewards, self.flawed, self._draw = given, {}, {}, draw
        for account, part in list(self._part.items()):
            over = self._used[account] >= self.seconds(account)
            self._part[account] = max(LEAST, part / 2) if over else min(1.0, part * 2)
        self._used.clear()

    def seconds(self, account: str) -> float:
        """That it may take in a round; the last completion may take longer, since none is broken off."""
        return SECONDS * self._part[account]

    def score(self, problem: Problem, text: str, account: str, peer: str = "", index: int = 0) -> Scored | None:
        """What ``peer``'s completion that ended is worth; None when the account's time is over."""
        name = peer, problem.number, index
        if name in self._given:
            return Scored(self._given[name])
        if self._used[account] >= self.seconds(account):
            return None
        began = self._clock()
        found = self.scored(problem, text, peer)
        self._used[account] += self._clock() - began
        self.rewards[name] = found.reward
        return found

    def scored(self, problem: Problem, text: str, peer: str = "") -> Scored:
        """The same, however long it takes."""
        if self._voting:
            return Scored(0.0, self._task.behaviour(problem, text, self._draw))
        reward, flaw = as_reward(self._task.score(problem, text))
        if flaw:
            self.flawed.setdefault(peer, f"{self._task.name}, problem {problem.number}: {flaw}")
        if not self._filtering or reward <= 0:
            return Scored(reward)
        return Scored(reward, self._task.behaviour(problem, text, self._draw, untested=True))


@dataclass(frozen=True)
class Schedule:
    """What may be sent in one round.

    Problem, answer and reward are computed again from the problem's number; a message carries no reward. The limits
    bound one peer's share of a round.
    """

    problems: Collection[int] | None
    """the round's; None where each peer chooses its own"""
    training: int
    """problems below this number are for training"""
    groups: int
    """most problems of one peer"""
    completions: int
    """most completions of one problem by one peer"""


def unscheduled(sent: Iterable[tuple[str, int]], schedule: Schedule) -> Mapping[int, str]:
    """Place of a completion among ``sent``, pairs of peer and problem → why it is none of this round's."""
    counts: Counter[tuple[str, int]] = Counter()
    chosen: dict[str, set[int]] = {}
    refused = {}
    for place, (peer, problem) in enumerate(sent):
        own = chosen.setdefault(peer, set())
        if problem >= schedule.training or (schedule.problems is not None and problem not in schedule.problems):
            refused[place] = f"problem {problem} is none of this round's"
        elif problem not in own and len(own) == schedule.groups:
            refused[place] = f"more than {schedule.groups} problems"
        elif counts[peer, problem] == schedule.completions:
            refused[place] = f"more than {schedule.completions} completions of one problem"
        else:
            own.add(problem)
            counts[peer, problem] += 1
    return refused


NO_ACCOUNTS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Turned:
    """A completion that was turned away before any policy read it."""

    peer: str
    problem: int
    index: int
    reason: str


def take_in(
    messages: Mapping[str, Rollouts],
    schedule: Schedule,
    scoring: Scoring,
    policy: Policy,
    max_new: int,
    asked: Asking,
    weights: str = "",
    accounts: Mapping[str, str] = NO_ACCOUNTS,
) -> tuple[list[Rollout], list[Turned]]:
    """The completions of one round in an order that is the same for all peers: by problem, peer, and place.

    ``weights``: the fingerprint of the reader's own. ``accounts``: peer → under whose part of the schedule it comes
    (:mod:`planaria.swarm.checks.defence`), in the order in which those of one account are served; itself unless given.
    """
    sent = [
        (peer, group.problem, index, completion)
        for peer, message in messages.items()
        for group in message.groups
        for index, completion in enumerate(group.completions)
    ]
    sent.sort(key=lambda entry: (entry[1], entry[0], entry[2]))
    refused = _beyond([entry[:3] for entry in sent], schedule, accounts)
    found, turned = [], [Turned(*sent[place][:3], reason) for place, reason in refused.items()]
    for place, (peer, number, index, completion) in enumerate(sent):
        if place in refused:
            continue
        account = accounts.get(peer, "")
        taken = _taken(messages[peer], completion, scoring, policy, max_new, asked(number), account or peer, index)
        if isinstance(taken, str):
            turned.append(Turned(peer, number, index, taken))
        else:
            alike = taken.logps is not None and messages[peer].weights == weights != ""
            found.append(replace(taken, peer=peer, index=index, alike=alike, account=account))
    return found, turned


def _beyond(sent: Sequence[tuple[str, int, int]], schedule: Schedule, accounts: Mapping[str, str]) -> Mapping[int, str]:
    """Place among ``sent``, (peer, problem, index) → why it is none of this round's. Of those who share an account,
    everybody's first comes before anybody's second."""
    lot = {peer: place for place, peer in enumerate(accounts)}
    order = sorted(range(len(sent)), key=lambda n: (sent[n][2], lot.get(sent[n][0], 0)))
    asked = [(accounts.get(sent[n][0], sent[n][0]), sent[n][1]) for n in order]
    found = {order[place]: reason for place, reason in unscheduled(asked, schedule).items()}
    shared = {n for n in found if accounts.get(sent[n][0], sent[n][0]) != sent[n][0]}
    return {n: f"{reason}, all newcomers together" if n in shared else reason for n, reason in sorted(found.items())}


def _taken(
    message: Rollouts,
    completion: Completion,
    scoring: Scoring,
    policy: Policy,
    max_new: int,
    asked: Asked,
    account: str,
    index: int,
) -> Rollout | str:
    """One completion of a message, scored; a text: why it is turned away."""
    problem, prompt = asked
    same = message.tokenizer == policy.tokenizer_fingerprint
    ids, logps = _own_ids(policy, completion, same)
    claimed = math.fsum(completion.logps) if logps is None and completion.logps is not None else None
    limit = min(max_new, policy.context - len(prompt))
    if objection := _wrong_length(len(ids), limit, completion.ended or not same):
        return objection
    scored = scoring.score(problem, completion.text, account, message.peer, index) if completion.ended else Scored()
    if scored is None:
        return f"what it sent took more than {scoring.seconds(account):g} s to score"
    text, ended = completion.text, completion.ended
    found = Rollout(problem, prompt, text, ids, ended, logps, round=message.round, claimed=claimed)
    return replace(found, reward=scored.reward, behaviour=scored.behaviour)


def _wrong_length(tokens: int, limit: int, may_be_short: bool) -> str:
    """Why a completion cannot have so many tokens; empty if it can. What did not end went on to the limit."""
    if not tokens or tokens > limit:
        return f"{tokens} tokens, of at most {limit}"
    return "" if may_be_short or tokens == limit else f"it broke off after {tokens} tokens, of {limit}"


def _own_ids(policy: Policy, completion: Completion, same: bool) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """The completion as our token ids, with the end token if it ended, and the claims that belong to them.

    A sender's ids are taken only where they say what its text says: what is scored and judged is what is trained on.
    Otherwise the text is tokenised again, and claims about other tokens mean nothing.
    """
    ids = completion.ids
    if same and ids is not None and all(0 <= i < policy.vocab for i in ids):
        body = ids[:-1] if completion.ended and ids and ids[-1] == policy.end else ids
        whole = len(body) + completion.ended == len(ids)
        if whole and policy.end not in body and _says(policy, body, completion.text):
            return tuple(ids), None if completion.logps is None else tuple(completion.logps)
    own = policy.encode(completion.text)
    return tuple([*own, policy.end] if completion.ended else own), None


def _says(policy: Policy, ids: Sequence[int], text: str) -> bool:
    """Whether the ids are a way to write the text, with none among them that nobody could read.

    Special tokens, and rows of a model that its tokenizer does not know, leave nothing in a text: between its letters
    they would be trained on unseen.
    """
    if policy.decode(ids) != text:
        return False
    silent = {i for i in ids if not policy.decode([i])}
    return not silent or policy.decode([i for i in ids if i not in silent]) != text


def with_reading(rollout: Rollout, reading: Reading) -> Rollout:
    """As this peer's policy reads it; a claim about a whole text, by another tokenizer, is spread over our tokens.

    Every token's ratio then is the sequence's geometric mean, exp((log π_θ − log π_gen) / T), and so is the
    divergence: Σ log p of a text does not depend on how it is cut, as far as both tokenizers cut it their usual way.
    """
    if rollout.claimed is None:
        return replace(rollout, reading=reading)
    shift = (math.fsum(reading.logps) - rollout.claimed) / len(rollout.ids)
    return replace(rollout, reading=reading, logps=tuple((reading.logps - shift).tolist()))
