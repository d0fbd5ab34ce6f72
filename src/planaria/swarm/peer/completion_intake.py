"""Conversion of peers' messages to completions: tokenized and scored by this peer."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planaria.swarm.board.message import Completion, Rollouts
from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.learning.weight_versions import why_stale
from planaria.swarm.peer.rollout import PromptByNumber, PromptedProblem, Rollout
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import CompletionStatistics
from planaria.swarm.records.lines import SCHEDULE, STALE
from planaria.swarm.tasks.base import Behaviour, Task, TaskProblem, as_reward

NO_REWARDS: Mapping[tuple[str, int, int], float] = {}

SECONDS = 30.0
"""scoring time per round for one peer, or all unknown peers together"""
MIN_SHARE = 1 / 16
"""minimum share of it, for a peer that exceeded it repeatedly"""


class CompletionScore(NamedTuple):
    """Score of a single completion."""

    reward: float = 0.0
    """by the task's own score; 0 if peers vote"""
    behaviour: Behaviour = ()
    """behaviour to vote on, if peers vote"""


class Scoring:
    """Scores completions within each account's time, which is halved after it was exceeded and doubled otherwise.

    Time depends on the machine: peers with equal weights diverge if only one of them runs out of it, as with a
    program's own limit.
    """

    def __init__(
        self, task: Task, clock: Callable[[], float] = time.monotonic, config: SwarmConfig | None = None
    ) -> None:
        """``config``: whether peers vote; by default they do not."""
        self._task = task
        self._clock = clock
        self._draw = 0
        self._voting = config is not None and config.task.reward == CONSENSUS
        self._filtering = config is not None and config.defence.consensus
        self._part: dict[str, float] = defaultdict(lambda: 1.0)
        self._used: dict[str, float] = defaultdict(float)
        self._certified = NO_REWARDS
        self.rewards: dict[tuple[str, int, int], float] = {}
        """(peer, problem, index) → reward, in this round"""
        self.flawed: dict[str, str] = {}
        """peer → description of its first flawed reward in this round"""

    @property
    def votes(self) -> bool:
        """Whether peers vote."""
        return self._voting or self._filtering

    def begin(self, certified: Mapping[tuple[str, int, int], float] = NO_REWARDS, draw: int = 0) -> None:
        """Begin a round.

        ``certified``: known rewards. ``draw``: a number, unpredictable when the round's completions were written.
        """
        self._certified = certified
        self.rewards = {}
        self.flawed = {}
        self._draw = draw
        for account, part in list(self._part.items()):
            over = self._used[account] >= self.seconds(account)
            self._part[account] = max(MIN_SHARE, part / 2) if over else min(1.0, part * 2)
        self._used.clear()

    def seconds(self, account: str) -> float:
        """Time limit of an account in a round; a completion in progress is not interrupted."""
        return SECONDS * self._part[account]

    def score(
        self, problem: TaskProblem, text: str, account: str, peer: str = "", index: int = 0
    ) -> CompletionScore | None:
        """Score a finished completion; None if the account's time is used up."""
        name = peer, problem.number, index
        if name in self._certified:
            return CompletionScore(self._certified[name])
        if self._used[account] >= self.seconds(account):
            return None
        began = self._clock()
        result = self.scored(problem, text, peer)
        self._used[account] += self._clock() - began
        self.rewards[name] = result.reward
        return result

    def scored(self, problem: TaskProblem, text: str, peer: str = "") -> CompletionScore:
        """Score a completion without a time limit."""
        if self._voting:
            return CompletionScore(0.0, self._task.behaviour(problem, text, self._draw))
        reward, flaw = as_reward(self._task.score(problem, text))
        if flaw:
            self.flawed.setdefault(peer, f"{self._task.name}, problem {problem.number}: {flaw}")
        if not self._filtering or reward <= 0:
            return CompletionScore(reward)
        return CompletionScore(reward, self._task.behaviour(problem, text, self._draw, untested=True))


@dataclass(frozen=True)
class RoundAllowance:
    """Completions permitted in one round.

    Problem, answer and reward are recomputed from the problem's number; a message carries no reward. The limits bound
    one peer's share of a round.
    """

    problems: Collection[int] | None
    """problems of the round; None if each peer chooses its own"""
    training: int
    """problems below this number are for training"""
    groups: int
    """maximum problems of one peer"""
    completions: int
    """maximum completions of one problem by one peer"""
    ahead: int = 0
    """maximum age in rounds of the weights that drew them"""


def unscheduled_completions(sent: Iterable[tuple[str, int]], schedule: RoundAllowance) -> Mapping[int, str]:
    """Return the indices of completions in ``sent``, (peer, problem), outside the schedule, with the reason."""
    counts: Counter[tuple[str, int]] = Counter()
    chosen: dict[str, set[int]] = {}
    refused = {}
    for index, (peer, problem) in enumerate(sent):
        own = chosen.setdefault(peer, set())
        if problem >= schedule.training or (schedule.problems is not None and problem not in schedule.problems):
            refused[index] = f"problem {problem} is not in this round"
        elif problem not in own and len(own) == schedule.groups:
            refused[index] = f"more than {schedule.groups} problems"
        elif counts[peer, problem] == schedule.completions:
            refused[index] = f"more than {schedule.completions} completions of one problem"
        else:
            own.add(problem)
            counts[peer, problem] += 1
    return refused


NO_DIGESTS: Mapping[int, str] = {}
NO_ACCOUNTS: Mapping[str, str] = {}


@dataclass(frozen=True)
class EarlyRejection:
    """A completion rejected before any policy read it."""

    peer: str
    problem: int
    index: int
    reason: str
    layer: str = SCHEDULE


def admit_completions(
    messages: Mapping[str, Rollouts],
    schedule: RoundAllowance,
    scoring: Scoring,
    policy: Policy,
    max_new: int,
    requested: PromptByNumber,
    weights: Mapping[int, str] = NO_DIGESTS,
    accounts: Mapping[str, str] = NO_ACCOUNTS,
) -> tuple[list[Rollout], list[EarlyRejection]]:
    """Return the completions of one round ordered by problem, peer and index, equally for all peers, and the rejected
    ones.

    ``weights``: version → fingerprint of the reader's weights. ``accounts``: peer → account whose limits it shares
    (:mod:`planaria.swarm.checks.defence`), in serving order; the peer itself by default.
    """
    old = {p: why for p, m in messages.items() if (why := why_stale(m.round, m.version_drawn, schedule.ahead))}
    results = []
    turned = [EarlyRejection(*entry[:3], why, STALE) for p, why in old.items() for entry in _sent(messages[p])]
    sent = [entry for peer, message in messages.items() if peer not in old for entry in _sent(message)]
    sent.sort(key=lambda entry: (entry[1], entry[0], entry[2]))
    refused = _outside_schedule([entry[:3] for entry in sent], schedule, accounts)
    turned += [EarlyRejection(*sent[position][:3], reason) for position, reason in refused.items()]
    for position, (peer, number, index, completion) in enumerate(sent):
        if position in refused:
            continue
        account = accounts.get(peer, "")
        taken = _admit(messages[peer], completion, scoring, policy, max_new, requested(number), account or peer, index)
        if isinstance(taken, str):
            turned.append(EarlyRejection(peer, number, index, taken))
        else:
            alike = taken.logps is not None and messages[peer].weights == weights.get(taken.version, "") != ""
            results.append(replace(taken, peer=peer, index=index, declares_same_weights=alike, account=account))
    return results, turned


def _sent(message: Rollouts) -> list[tuple[str, int, int, Completion]]:
    """(peer, problem, index, completion) of a message."""
    return [
        (message.peer, group.problem, index, completion)
        for group in message.groups
        for index, completion in enumerate(group.completions)
    ]


def _outside_schedule(
    sent: Sequence[tuple[str, int, int]], schedule: RoundAllowance, accounts: Mapping[str, str]
) -> Mapping[int, str]:
    """Return the indices of completions in ``sent``, (peer, problem, index), outside the schedule, with the reason.
    Peers that share an account are served in turn."""
    lot = {peer: index for index, peer in enumerate(accounts)}
    order = sorted(range(len(sent)), key=lambda n: (sent[n][2], lot.get(sent[n][0], 0)))
    requested = [(accounts.get(sent[n][0], sent[n][0]), sent[n][1]) for n in order]
    result = {order[index]: reason for index, reason in unscheduled_completions(requested, schedule).items()}
    shared = {n for n in result if accounts.get(sent[n][0], sent[n][0]) != sent[n][0]}
    return {n: f"{reason}, all newcomers together" if n in shared else reason for n, reason in sorted(result.items())}


def _admit(
    message: Rollouts,
    completion: Completion,
    scoring: Scoring,
    policy: Policy,
    max_new: int,
    requested: PromptedProblem,
    account: str,
    index: int,
) -> Rollout | str:
    """Return one scored completion, or the reason to reject it."""
    problem, prompt = requested
    same = message.tokenizer == policy.tokenizer_fingerprint
    ids, logps = _own_ids(policy, completion, same)
    claimed = math.fsum(completion.logps) if logps is None and completion.logps is not None else None
    limit = min(max_new, policy.context - len(prompt))
    if objection := _wrong_length(len(ids), limit, completion.ended or not same):
        return objection
    scored = (
        scoring.score(problem, completion.text, account, message.peer, index) if completion.ended else CompletionScore()
    )
    if scored is None:
        return f"its completions took more than {scoring.seconds(account):g} s to score"
    text, ended = completion.text, completion.ended
    rollout = Rollout(problem, prompt, text, ids, ended, logps, round=message.round, claimed=claimed)
    return replace(rollout, version=message.version_drawn, reward=scored.reward, behaviour=scored.behaviour)


def _wrong_length(tokens: int, limit: int, may_be_short: bool) -> str:
    """Return why a completion's length is invalid; empty if it is valid. An unfinished one must reach the limit."""
    if not tokens or tokens > limit:
        return f"{tokens} tokens; it must have from 1 to {limit}"
    return "" if may_be_short or tokens == limit else f"it ended early, after {tokens} of {limit} tokens"


def _own_ids(policy: Policy, completion: Completion, same: bool) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """Return the completion as this peer's token ids, with the end token if it ended, and its log-probabilities.

    The sender's ids are used only if they decode to its text, so that the scored text is the trained one. Otherwise the
    text is tokenized again, and the sender's log-probabilities are dropped.
    """
    ids = completion.ids
    if same and ids is not None and all(0 <= i < policy.vocab for i in ids):
        body = ids[:-1] if completion.ended and ids and ids[-1] == policy.end else ids
        whole = len(body) + completion.ended == len(ids)
        if whole and policy.end not in body and _matches(policy, body, completion.text):
            return tuple(ids), None if completion.logps is None else tuple(completion.logps)
    own = policy.encode(completion.text)
    return tuple([*own, policy.end] if completion.ended else own), None


def _matches(policy: Policy, ids: Sequence[int], text: str) -> bool:
    """Whether the ids decode to the text and none of them is invisible.

    Special tokens, and ids unknown to the tokenizer, decode to nothing: they would be trained on unseen.
    """
    if policy.decode(ids) != text:
        return False
    silent = {i for i in ids if not policy.decode([i])}
    return not silent or policy.decode([i for i in ids if i not in silent]) != text


def with_reading(rollout: Rollout, reading: CompletionStatistics) -> Rollout:
    """Add this policy's reading; spread the log-probability of a whole text under another tokenizer over the tokens.

    Each token's ratio is then the sequence's geometric mean, exp((log π_θ − log π_gen) / T), and so is the divergence:
    Σ log p of a text does not depend on the tokenization, if both tokenizers use their canonical one.
    """
    if rollout.claimed is None:
        return replace(rollout, reading=reading)
    shift = (math.fsum(reading.logps) - rollout.claimed) / len(rollout.ids)
    return replace(rollout, reading=reading, logps=tuple((reading.logps - shift).tolist()))
