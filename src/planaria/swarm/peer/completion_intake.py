"""Conversion of peers' messages to completions: tokenized and scored by this peer."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planaria.swarm.board.message import Completion, Rollouts
from planaria.swarm.config.swarm_config import CONSENSUS, SwarmConfig
from planaria.swarm.learning.weight_versions import why_stale
from planaria.swarm.peer.rollout import PromptByNumber, Rollout
from planaria.swarm.policy.base import Policy
from planaria.swarm.records.lines import SCHEDULE, STALE, SampleRecord
from planaria.swarm.tasks.base import Behaviour, Task, TaskProblem, as_reward

NO_REWARDS: Mapping[tuple[str, int, int], float] = {}

SCORING_LIMIT_S = 30.0
"""scoring time per round for one peer, or all unknown peers together"""
MIN_SHARE = 1 / 16
"""minimum share of it, for a peer that exceeded it repeatedly"""


class CompletionScore(NamedTuple):
    """Score of a single completion."""

    reward: float = 0.0
    """reward by the task's own score; 0 if peers vote"""
    behaviour: Behaviour = ()
    """behaviour to vote on, if peers vote"""


class Scoring:
    """Scores completions within each account's time limit, which is halved when exceeded and doubled otherwise.

    Time depends on the machine: peers with equal weights diverge if only one of them runs out of it, as with a
    program's own limit.
    """

    def __init__(
        self, task: Task, clock: Callable[[], float] = time.monotonic, config: SwarmConfig | None = None
    ) -> None:
        """Score completions of ``task``.

        :param config: decides whether peers vote; by default they do not
        """
        self._task = task
        self._clock = clock
        self._draw_number = 0
        self._voting = config is not None and config.task.reward == CONSENSUS
        self._filtering = config is not None and config.defence.consensus
        self._time_share: dict[str, float] = defaultdict(lambda: 1.0)
        self._used: dict[str, float] = defaultdict(float)
        self._certified = NO_REWARDS
        self.rewards: dict[tuple[str, int, int], float] = {}
        """(peer, problem, index) → reward, in this round"""
        self.flawed: dict[str, str] = {}
        """peer → description of its first flawed reward in this round"""

    @property
    def votes(self) -> bool:
        return self._voting or self._filtering

    def begin(self, certified: Mapping[tuple[str, int, int], float] = NO_REWARDS, draw: int = 0) -> None:
        """Begin a round.

        :param certified: known rewards
        :param draw: number that was unpredictable when the round's completions were written
        """
        self._certified = certified
        self.rewards = {}
        self.flawed = {}
        self._draw_number = draw
        for account, share in list(self._time_share.items()):
            over = self._used[account] >= self.time_limit_s(account)
            self._time_share[account] = max(MIN_SHARE, share / 2) if over else min(1.0, share * 2)
        self._used.clear()

    def time_limit_s(self, account: str) -> float:
        """Time limit of an account in a round; a completion in progress is not interrupted."""
        return SCORING_LIMIT_S * self._time_share[account]

    def score(
        self, problem: TaskProblem, text: str, account: str, peer: str = "", index: int = 0
    ) -> CompletionScore | None:
        """Score a finished completion; return None if the account's time is used up."""
        name = peer, problem.number, index
        if name in self._certified:
            return CompletionScore(self._certified[name])
        if self._used[account] >= self.time_limit_s(account):
            return None
        began = self._clock()
        result = self.score_untimed(problem, text, peer)
        self._used[account] += self._clock() - began
        self.rewards[name] = result.reward
        return result

    def score_untimed(self, problem: TaskProblem, text: str, peer: str = "") -> CompletionScore:
        """Score a completion without a time limit."""
        if self._voting:
            return CompletionScore(0.0, self._task.behaviour(problem, text, self._draw_number))
        reward, flaw = as_reward(self._task.score(problem, text))
        if flaw:
            self.flawed.setdefault(peer, f"{self._task.name}, problem {problem.number}: {flaw}")
        if not self._filtering or reward <= 0:
            return CompletionScore(reward)
        return CompletionScore(reward, self._task.behaviour(problem, text, self._draw_number, untested=True))


@dataclass(frozen=True)
class RoundAllowance:
    """Completions permitted in one round.

    Problem, answer and reward are recomputed from the problem's number; a message carries no reward. The limits bound
    one peer's share of a round.
    """

    problems: Collection[int] | None
    """problems of the round, or None if each peer chooses its own"""
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
    rejected = {}
    for index, (peer, problem) in enumerate(sent):
        own = chosen.setdefault(peer, set())
        if problem >= schedule.training or (schedule.problems is not None and problem not in schedule.problems):
            rejected[index] = f"problem {problem} is not in this round"
        elif problem not in own and len(own) == schedule.groups:
            rejected[index] = f"more than {schedule.groups} problems"
        elif counts[peer, problem] == schedule.completions:
            rejected[index] = f"more than {schedule.completions} completions of one problem"
        else:
            own.add(problem)
            counts[peer, problem] += 1
    return rejected


@dataclass(frozen=True)
class SentCompletion:
    """A completion as its peer sent it."""

    peer: str
    round: int
    problem: int
    index: int
    """index among the peer's completions of the problem"""
    completion: Completion

    def rejection(self, reason: str, layer: str = SCHEDULE) -> SampleRecord:
        """Return the record of its rejection before any policy read it."""
        return SampleRecord(
            peer=self.peer,
            round=self.round,
            problem=self.problem,
            index=self.index,
            reward=0.0,
            passed=[],
            layer=layer,
            reason=reason,
        )


@dataclass(frozen=True)
class CompletionIntake:
    """Admits the completions of one round."""

    schedule: RoundAllowance
    scoring: Scoring
    policy: Policy
    max_new: int
    """maximum tokens of a completion"""
    prompted: PromptByNumber
    weights: Mapping[int, str] = field(default_factory=dict)
    """version → fingerprint of the reader's weights"""
    accounts: Mapping[str, str] = field(default_factory=dict)
    """peer → account whose limits it shares (:mod:`planaria.swarm.checks.defence`), in serving order; the peer itself
    by default"""

    def admit(self, messages: Mapping[str, Rollouts]) -> tuple[list[Rollout], list[SampleRecord]]:
        """Return the completions ordered by problem, peer and index, equally for all peers, and the rejected ones."""
        old = {
            peer: why
            for peer, message in messages.items()
            if (why := why_stale(message.round, message.version_drawn, self.schedule.ahead))
        }
        rejections = [
            sent.rejection(why, STALE) for peer, why in old.items() for sent in _sent_completions(messages[peer])
        ]
        current = [sent for peer, message in messages.items() if peer not in old for sent in _sent_completions(message)]
        current.sort(key=lambda sent: (sent.problem, sent.peer, sent.index))
        rejected = _outside_schedule(current, self.schedule, self.accounts)
        rejections += [current[position].rejection(reason) for position, reason in rejected.items()]
        results = []
        for position, sent in enumerate(current):
            if position in rejected:
                continue
            rollout = self._read(messages[sent.peer], sent)
            if isinstance(rollout, str):
                rejections.append(sent.rejection(rollout))
            else:
                results.append(rollout)
        return results, rejections

    def _read(self, message: Rollouts, sent: SentCompletion) -> Rollout | str:
        """Return one scored completion, or the reason to reject it."""
        problem, prompt = self.prompted(sent.problem)
        completion, account = sent.completion, self.accounts.get(sent.peer, "")
        same = message.tokenizer == self.policy.tokenizer_fingerprint
        ids, logps = _own_ids(self.policy, completion, same)
        claimed = math.fsum(completion.logps) if logps is None and completion.logps is not None else None
        limit = min(self.max_new, self.policy.context - len(prompt))
        if objection := _length_error(len(ids), limit, completion.ended or not same):
            return objection
        payer = account or sent.peer
        score = CompletionScore()
        if completion.ended:
            scored = self.scoring.score(problem, completion.text, payer, sent.peer, sent.index)
            if scored is None:
                return f"its completions took more than {self.scoring.time_limit_s(payer):g} s to score"
            score = scored
        fingerprint = self.weights.get(message.version_drawn, "")
        return Rollout(
            problem,
            prompt,
            completion.text,
            ids,
            completion.ended,
            logps,
            peer=sent.peer,
            account=account,
            round=message.round,
            version=message.version_drawn,
            index=sent.index,
            reward=score.reward,
            behaviour=score.behaviour,
            declares_same_weights=logps is not None and message.weights == fingerprint != "",
            claimed=claimed,
        )


def _sent_completions(message: Rollouts) -> list[SentCompletion]:
    return [
        SentCompletion(message.peer, message.round, group.problem, index, completion)
        for group in message.groups
        for index, completion in enumerate(group.completions)
    ]


def _outside_schedule(
    sent: Sequence[SentCompletion], schedule: RoundAllowance, accounts: Mapping[str, str]
) -> Mapping[int, str]:
    """Return the indices of completions in ``sent`` outside the schedule, with the reason. Peers that share an account
    are served in turn."""
    serving_order = {peer: index for index, peer in enumerate(accounts)}
    order = sorted(range(len(sent)), key=lambda n: (sent[n].index, serving_order.get(sent[n].peer, 0)))
    requested = [(accounts.get(sent[n].peer, sent[n].peer), sent[n].problem) for n in order]
    result = {order[index]: reason for index, reason in unscheduled_completions(requested, schedule).items()}
    shared = {n for n in result if accounts.get(sent[n].peer, sent[n].peer) != sent[n].peer}
    return {n: f"{reason}, all newcomers together" if n in shared else reason for n, reason in sorted(result.items())}


def _length_error(tokens: int, limit: int, may_be_short: bool) -> str:
    """Return why a completion's length is invalid, or an empty string if it is valid. An unfinished one must reach the
    limit.
    """
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
    """Return whether the ids decode to the text and none of them is invisible.

    Special tokens, and ids unknown to the tokenizer, decode to nothing: they would be trained on unseen.
    """
    if policy.decode(ids) != text:
        return False
    silent = {i for i in ids if not policy.decode([i])}
    return not silent or policy.decode([i for i in ids if i not in silent]) != text
