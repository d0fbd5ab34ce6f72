"""One peer: generate, publish, gather, examine and learn in each round."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planaria.swarm.attacks import HONEST
from planaria.swarm.attacks.attacker import Attacker
from planaria.swarm.board.attendance import RoundMessages
from planaria.swarm.board.message import Completion, ProblemCompletions, Rollouts
from planaria.swarm.board.peer_board import PeerBoard
from planaria.swarm.checks.base import Check, Context
from planaria.swarm.checks.defence import Defence, DefenceReport, configuration_warnings
from planaria.swarm.completions.remote_sampling import RemoteSampler
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.advantages import Advantages, mix_groups, round_advantages, with_length_penalty
from planaria.swarm.learning.learner import Learner, UpdateResult
from planaria.swarm.peer.author import Author, Draw, Draws
from planaria.swarm.peer.completion_intake import NO_REWARDS, CompletionIntake, RoundAllowance, Scoring
from planaria.swarm.peer.evaluation import Examiner
from planaria.swarm.peer.random_draws import seed_from_messages, shared_problems
from planaria.swarm.peer.recovery import PeerRecovery
from planaria.swarm.peer.rollout import PromptByNumber, PromptedProblem, Rollout, prompt_for, read_rollouts
from planaria.swarm.peer.shadow import Shadow
from planaria.swarm.policy.base import Policy, likelihood_digest, weights_digest, weights_fingerprint
from planaria.swarm.records.lines import (
    LOG,
    POISON,
    SAMPLES,
    Evaluated,
    Finished,
    Log,
    PeerStarted,
    PoisonRecord,
    SampleRecord,
)
from planaria.swarm.records.round_records import round_record, sample_records, summarize_votes
from planaria.swarm.records.saved_state import PEER, SHADOW
from planaria.swarm.tasks.base import Task

log = logging.getLogger(__name__)


@dataclass
class Stopwatch:
    """Seconds of each phase of a round."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Peer:
    """A peer of a run."""

    def __init__(
        self,
        config: SwarmConfig,
        name: str,
        folder: Path,
        board: PeerBoard,
        task: Task,
        policy: Policy,
        checks: Sequence[Check],
        first: int = 0,
        known: Set[str] = frozenset(),
        server: RemoteSampler | None = None,
    ) -> None:
        """Assemble the opened parts of a peer.

        :param config: the peer's own configuration; peers may differ except in the rules of the run
        :param folder: folder of the peer's records
        :param first: first round of this peer
        :param known: ids of the run's own peers
        :param server: draws instead of the policy
        """
        self.config = config
        self.name = name
        self.board = board
        self.task = task
        self.policy = policy
        self.id = board.me
        self.first = first
        context = Context(task, config.seed, config.sampling.support(policy.vocab), policy.vocab)
        peers = config.size if config.rounds.gather else 1
        self._warnings = configuration_warnings(checks, context, peers) + _committee_warnings(board)
        self._defence = Defence(config.defence, checks, context, known, config.size)
        if server is not None:
            server.start_at(first)
        self._author = (
            Author(config, name, task, server.policy if server else policy, server)
            if config.attack.kind == HONEST
            else Attacker(config, name, task, policy, checks)
        )
        self.scoring = Scoring(task, config=config)
        self._examiner = Examiner(task, config, name)
        self.learner = Learner(config, policy)
        self._draws = Draws(config, self.learner.versions, self._author, server, self._prompted_problems, self.count)
        self._log = Log(folder / LOG)
        self.samples = Log(folder / SAMPLES)
        self._poison = None if config.attack.kind == HONEST else Log(folder / POISON)
        self.shadow = Shadow(config, name, task, policy) if config.shadow else None
        learners = {PEER: self.learner} | ({} if self.shadow is None else {SHADOW: self.shadow.learner})
        self.recovery = PeerRecovery(config, name, folder, board, learners, self._defence)

    def run(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Run all rounds, from the first or the last saved state; call ``after_each`` after every round."""
        start = self.recovery.resume(self.first)
        self._log.append(self._start_record())
        log.info("starts with round %d of %d", start, self.config.rounds.count)
        if start == self.first:
            self._evaluate(self.first)
        self.recovery.stop_on_accuracy_drop(start)
        with closing(self._draws):
            self._run_from(start, after_each)
        self._log.append(Finished())

    def _run_from(self, round_number: int, after_each: Callable[[], None]) -> None:
        """Run the rounds from ``round_number``."""
        rounds, every = self.config.rounds, self.config.evaluate.every
        while round_number < rounds.count:
            self.run_round(round_number)
            round_number += 1
            last = round_number == rounds.count
            if last or (every and round_number % every == 0):
                self._evaluate(round_number)
            saved = self.recovery.save(round_number)
            self.recovery.stop_on_accuracy_drop(round_number)
            after_each()
            done, round_number = round_number, self.recovery.roll_back_if_overruled(round_number)
            if round_number != done:
                self._draws.forget()
            if (last or saved) and round_number == done and not self.board.may_be_overruled:
                self.board.receipts.publish_receipt("weights", round_number, weights_digest(self.policy.module))

    def run_round(self, round_number: int) -> None:
        """Take part in a round, or catch up if the other peers have closed it."""
        watch = Stopwatch()
        requested = functools.cache(lambda problem: prompt_for(self.task.problem(problem), self.policy))
        problems = [requested(problem) for problem in self._problems(round_number)]
        closed, draw = self._write(round_number, problems)
        watch.lap("write")
        messages = self.board.gather(round_number, closed)
        self.recovery.remember_state()
        watch.lap("wait")
        admitted, rejected = self._admit(round_number, messages, closed, requested)
        report = self._defence.examine(round_number, self._read_with_drawing_weights(admitted))
        watch.lap("read")
        advantages, update = self._learn(round_number, report, problems)
        watch.lap("learn")
        self.samples.append(*sample_records(report, advantages, round_number), *rejected)
        record = round_record(
            round_number,
            self.id,
            report,
            advantages,
            update,
            rejected,
            seconds={phase: round(value, 4) for phase, value in watch.seconds.items()},
            rejected_messages=dict(messages.rejected),
            missing=list(messages.missing),
            serving=None if draw is None else draw.serving,
            **self._round_fields(round_number, report),
        )
        self._log.append(record)
        received = len(messages.found)
        log.debug(
            "round %d: messages of %d peers, %d completions rejected unread", round_number, received, len(rejected)
        )

    def _round_fields(self, round_number: int, report: DefenceReport) -> dict[str, Any]:
        """Return fields of a round's record that depend on the peer's state after the round."""
        staleness = Counter(round_number - rollout.version for rollout in report.rollouts)
        return {
            "staleness": staleness if self.config.rounds.ahead else {},
            "flawed": dict(self.scoring.flawed),
            "certified": self.board.receipts.signers("round", round_number),
            "agreed": summarize_votes(report, self.task) if self.scoring.votes else None,
            "weights": weights_fingerprint(self.policy.module),
        }

    def _write(self, round_number: int, problems: Sequence[PromptedProblem]) -> tuple[bool, Draw | None]:
        """Begin the round and publish this peer's completions; return whether others have closed it, and the draw."""
        self.learner.versions.record(round_number, likelihood_digest(self.policy))
        closed = self.board.begin_round(round_number)
        sends = not closed and self._author.sends(round_number)
        return closed, self._publish(round_number, problems) if sends else None

    def _learn(
        self, round_number: int, report: DefenceReport, problems: Sequence[PromptedProblem]
    ) -> tuple[Advantages, UpdateResult]:
        """Update the policy, and the copy that learns alone, if any."""
        advantages = self._advantages(round_number, report)
        rollouts = advantages.rollouts
        if self.config.rounds.ahead:
            rollouts = self._read_with_current_weights(rollouts)
        update = self.learner.learn(round_number, rollouts, self.config.defence.share)
        if self.shadow is not None:
            self.shadow.run_round(round_number, problems, self.count)
        return advantages, update

    def _admit(
        self, round_number: int, messages: RoundMessages, closed: bool, requested: PromptByNumber
    ) -> tuple[list[Rollout], list[SampleRecord]]:
        """Return the scored completions of a round's messages and the rejected ones.

        Rewards of a ``closed`` round come from its certificate, if there is one; otherwise this peer signs its own.
        """
        votes = self.scoring.votes
        # Certified rewards do not contain the behaviour that peers vote on.
        certified = self.board.rewards(round_number, messages) if closed and not votes else NO_REWARDS
        self.scoring.begin(
            certified, seed_from_messages(self.config.seed, round_number, messages.texts) if votes else 0
        )
        accounts = self._defence.accounts.record_senders(round_number, messages.found.keys())
        intake = CompletionIntake(
            self._schedule(round_number),
            self.scoring,
            self.policy,
            self.config.sampling.max_new,
            requested,
            self.learner.versions.digests,
            accounts,
        )
        admitted = intake.admit(messages.found)
        if not certified and not votes:
            self.board.sign_rewards(round_number, messages, self.scoring.rewards)
        return admitted

    def _prompted_problems(self, round_number: int) -> list[PromptedProblem]:
        return [prompt_for(self.task.problem(problem), self.policy) for problem in self._problems(round_number)]

    def _problems(self, round_number: int) -> list[int]:
        rounds, training = self.config.rounds, self.task.training
        if rounds.mode == "horizontal":
            return shared_problems(self.config.seed, round_number, training, rounds.prompts)
        return self._author.choose(round_number, rounds.prompts // self.config.size)

    def _schedule(self, round_number: int) -> RoundAllowance:
        rounds, size, training = self.config.rounds, self.config.size, self.task.training
        if rounds.mode == "vertical":
            return RoundAllowance(None, training, rounds.prompts // size, rounds.group, rounds.ahead)
        chosen = shared_problems(self.config.seed, round_number, training, rounds.prompts)
        return RoundAllowance(frozenset(chosen), training, len(chosen), rounds.group // size, rounds.ahead)

    @property
    def count(self) -> int:
        """Completions that one peer sends per problem."""
        rounds = self.config.rounds
        return rounds.group if rounds.mode == "vertical" else rounds.group // self.config.size

    def _publish(self, round_number: int, requested: Sequence[PromptedProblem]) -> Draw:
        draw = self._draws.collect(round_number, requested)
        if self._poison is not None:
            self._poison.append(
                *(
                    PoisonRecord(round=round_number, problem=rollout.problem.number, index=index)
                    for rollouts in draw.completions
                    for index, rollout in enumerate(rollouts)
                    if rollout.poison
                )
            )
        self.board.publish(self._message(round_number, draw))
        return draw

    def _message(self, round_number: int, draw: Draw) -> Rollouts:
        groups = tuple(
            ProblemCompletions(
                problem=rollouts[0].problem.number,
                completions=tuple(Completion(text=r.text, ended=r.ended, ids=r.ids, logps=r.logps) for r in rollouts),
            )
            for rollouts in draw.completions
        )
        return Rollouts(
            run=self.board.run,
            peer=self.id,
            round=round_number,
            tokenizer=self.policy.tokenizer_fingerprint,
            weights=draw.weights,
            weights_round=draw.version if self.config.rounds.ahead else None,
            groups=groups,
        )

    def _read_with_drawing_weights(self, arrived: Sequence[Rollout]) -> list[Rollout]:
        """Read completions with the weights that drew them, as the checks require."""
        result: dict[int, Rollout] = {}
        for version in sorted({rollout.version for rollout in arrived}):
            indices = [index for index, rollout in enumerate(arrived) if rollout.version == version]
            with self.learner.versions.load_version(version):
                result |= zip(
                    indices, self._read_with_current_weights([arrived[index] for index in indices]), strict=True
                )
        limit, margin = self.config.sampling.max_new, self.config.loss.overlong
        return [with_length_penalty(result[index], limit, margin) for index in range(len(arrived))]

    def _read_with_current_weights(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Read completions with the policy's present weights."""
        return read_rollouts(self.policy, rollouts, self.config.sampling)

    def _advantages(self, round_number: int, report: DefenceReport) -> Advantages:
        config = self.config
        rollouts = report.accepted
        if config.defence.rejected == "zero":
            rollouts = [replace(rollout, reward=0.0) if rollout.layer else rollout for rollout in report.rollouts]
        result = round_advantages(rollouts, config.rounds.mode, config.loss.kind != "dr_grpo")
        if config.rounds.own is None:
            return result
        return mix_groups(result, rollouts, self.id, config.rounds, config.seed, self.name, round_number)

    def _start_record(self) -> PeerStarted:
        return PeerStarted(
            name=self.name,
            id=self.id,
            attack=self.config.attack.kind,
            model=describe(self.policy),
            parameters=sum(p.numel() for p in self.policy.module.parameters()),
            vocab=self.policy.vocab,
            first_round=self.first,
            run=self.board.run,
            warnings=self._warnings,
        )

    def _evaluate(self, after: int) -> None:
        result = self._examiner.examine(self.policy)
        self.recovery.record_accuracy(after, result.accuracy.rate or 0.0)
        alone = self.shadow.examine(self._examiner).accuracy if self.shadow is not None else None
        self._log.append(
            Evaluated(round=after, accuracy=result.accuracy, alone=alone, tokens=result.tokens, watch=result.watch)
        )


def _committee_warnings(board: PeerBoard) -> list[str]:
    committee = board.receipts.committee
    if committee is None or committee.max_faulty:
        return []
    return [f"a committee of {len(committee.members)} tolerates no Byzantine member; use at least 4 members"]


def describe(policy: Policy) -> str:
    """Describe a policy in a line."""
    numbers = [p.numel() for p in policy.module.parameters()]
    trained = sum(p.numel() for p in policy.module.parameters() if p.requires_grad)
    adapters = "" if trained == sum(numbers) else f", {trained:,} of them trained"
    return f"{type(policy.module).__name__}, {sum(numbers):,} parameters{adapters}, {policy.vocab:,} tokens"
