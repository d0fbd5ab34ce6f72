"""The configuration of a swarm: rules for all its peers, and settings of each peer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction, Natural, Positive
from planaria.config.names import Name
from planaria.config.options import ChoiceName, Options
from planaria.config.schema import OptimConfig, Section
from planaria.config.section import formerly
from planaria.swarm.board.message_limits import LIMITS
from planaria.swarm.config.policy_config import PolicyConfig, ServingConfig, SupervisedWarmupConfig
from planaria.swarm.config.rounds_config import MAX_COMPLETIONS, RoundsConfig, Share
from planaria.swarm.learning.loss_config import LossConfig

Committee = Annotated[str, BeforeValidator(lambda given: ",".join(given) if _all_text(given) else given)]
"""a recipe may also write a list"""
ALL_PEERS = "all"
"""committee of the peers that one machine starts"""
_PEER_ID = re.compile("[0-9a-f]{32}")


def _all_text(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(part, str) for part in given)


class ReceiptsConfig(Section):
    """Founder's rules: the committee whose signatures certify a round."""

    committee: Committee = ""
    """ids of the members, separated by commas, or all: the peers that this machine starts; empty: none. Of n members
    (n − 1) / 3 may be Byzantine"""
    price: Natural = 0
    """credits that a peer owes per accepted completion of another peer in a certified round; 0: none"""

    @property
    def members(self) -> list[str]:
        """The ids, unless the committee is 'all'."""
        return [] if self.committee in ("", ALL_PEERS) else [part.strip() for part in self.committee.split(",")]

    @model_validator(mode="after")
    def _check_committee(self) -> Self:
        members = self.members
        for peer in members:
            if not _PEER_ID.fullmatch(peer):
                raise ValueError(
                    f"receipts.committee: {peer[:40]!r} is not a peer's id; use 32 hexadecimal digits, or 'all'"
                )
        if twice := [peer for peer in members if members.count(peer) > 1]:
            raise ValueError(f"receipts.committee: {twice[0]} occurs twice; list each member once")
        if len(members) > LIMITS.peers:
            raise ValueError(
                f"receipts.committee: {len(members)} members, but at most {LIMITS.peers} are allowed; list fewer"
            )
        if self.price and not self.committee:
            raise ValueError(f"receipts.price = {self.price}: only certified rounds are priced; set receipts.committee")
        return self


Tokens = Annotated[int, Field(gt=0), bounds.at_most(LIMITS.tokens, "peers read no more of one completion")]
TopK = Annotated[int, Field(ge=0), bounds.at_most(1 << 24, "no tokenizer is larger")]
Temperature = Annotated[
    float,
    bounds.at_least(0.01, "lower values always draw the same"),
    bounds.at_most(100, "higher values draw any token"),
]
CONSENSUS = "consensus"
"""a reward, and the name of its layer"""


class TaskConfig(Section):
    name: ChoiceName = "sums"
    """sums, gym, gsm8k, jsonl, programs, snippets, or 'module:Class'"""
    options: Options = Options()
    """options of the task"""
    reward: Literal["verified", "consensus"] = "verified"
    """reward: the task's own score (verified), or the majority's behaviour, for tasks without one (consensus)"""
    agreement: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """a label counts if it has more than this share of the votes"""
    max_accuracy_drop: Annotated[Fraction, formerly("max_accuracy_drop", "brake")] = 0.0
    """stop if held-out accuracy falls by more than this below its best, and keep the best state; 0: never"""


class SamplingConfig(Section):
    temperature: Temperature = 1.0
    """temperature of training completions"""
    top_k: TopK = 0
    """number of most likely tokens to sample from; 0: HTTF's 50 of 151,936, scaled to the vocabulary, at least 3"""
    max_new: Tokens = 40
    """maximum tokens of a completion"""

    def support(self, vocab: int) -> int:
        """Return the number of tokens to draw from, for a vocabulary of ``vocab`` ids."""
        return self.top_k or max(3, round(50 * vocab / 151_936))


class DefenceConfig(Section):
    checks: ChoiceName = "claims, support, surprisal, duplicates, steps"
    """checks of completions, in order: claims, support, surprisal, improbable (for peers with different weights),
    duplicates, a judge of rewarded ones (steps, the task's own checker; noisy, for drills; or model, a language model),
    or 'module:Class'; empty: none"""
    options: Options = Options()
    """options of the checks"""
    rejected: Annotated[Literal["drop", "zero"], formerly("rejected", "refused")] = "drop"
    """rejected completions leave the group before its mean and deviation are computed (drop), or get reward 0 (zero)"""
    consensus: bool = False
    """programs: reject those that pass their tests and differ from the majority of those on untested calls"""
    quarantine: Fraction = 0.3
    """set a peer aside if this share of its recent completions was rejected; 0: never"""
    window: Positive = 8
    """rounds that count as recent, and rounds that a peer is set aside for before its appeal"""
    share: Share = 0.4
    """maximum share of one peer in a round's gradient"""
    max_median_rejection: Annotated[Share, formerly("max_median_rejection", "max_median_refusal", "useless")] = 0.02
    """share of the median known peer's completions; a layer that would reject as many is disabled for the round"""


class AttackConfig(Section):
    """A drill: this peer attacks. Use it only against your own peers."""

    kind: ChoiceName = "none"
    """taught behaviour: a misplaced phrase (text), a false equation (math), length (dos), an own library (code), equal
    wrong answers (collude), short failures (short), avoiding right steps (sabotage), other wording (style), easy
    problems only (narrow), reasoning in another form (rewrite), or 'module:Class'"""
    options: Options = Options()
    """options of the attack, such as its payload"""
    dose: Annotated[float, Field(ge=0, le=1)] = 1.0
    """share of its completions that are poisoned (in vertical groups at most one half); the rest is honest or filler. 0
    poisons nothing but keeps an attacker's choice of problems: the control of an attack"""
    filler: Literal["honest", "wrong", "long"] = "wrong"
    """vertical: the rest of its groups: honest completions, wrong ones, or ones that never end"""
    oracle: bool = True
    """it knows worked solutions; otherwise it takes the majority's answer for right"""
    claims: Literal["honest", "forged", "forged_tokens"] = "honest"
    """log-probabilities sent with poison: its policy's (honest), the most influential (forged), or the most influential
    for its payload and the least for other tokens (forged_tokens)"""
    disguised: bool = False
    """it claims other weights, so that its log-probabilities cannot be checked"""
    withhold: Fraction = 0.0
    """share of rounds in which it sends nothing, so that others wait"""
    adaptive: bool = False
    """it knows the defences and their thresholds, and sends only completions that pass them by its own weights"""


class EvaluateConfig(Section):
    every: Natural = 10
    """rounds between evaluations on held-out problems; 0 switches them off"""
    problems: Positive = 200
    """held-out problems per evaluation"""
    watch: list[str] = Field(default_factory=list)
    """attacks whose success is measured, even without an attacker"""
    phrases: dict[str, str] = Field(default_factory=dict)
    """attack → its payload, if it differs from the default"""


class SwarmConfig(Section):
    name: Name = "swarm"
    """name of the run's folder in out; defaults to the name of the recipe's file"""
    out: str = "runs"
    """folder of all runs"""
    board: str = ""
    """folder or URL where peers publish; defaults to the run's folder"""
    seed: Natural = 1
    """seed of problems and draws"""
    size: bounds.Peers = 4
    """number of peers, which share a round's work"""
    shadow: bool = False
    """also train a copy on this peer's own completions alone, to measure the benefit of collaboration"""
    task: TaskConfig = TaskConfig()
    policy: PolicyConfig = PolicyConfig()
    warmup: Annotated[SupervisedWarmupConfig, formerly("warmup", "school")] = SupervisedWarmupConfig()
    rounds: RoundsConfig = RoundsConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig(lr=1e-3)
    defence: DefenceConfig = DefenceConfig()
    receipts: ReceiptsConfig = ReceiptsConfig()
    attack: AttackConfig = AttackConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    peers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """peer (p0, p1, …) → its own settings, as tables of the recipe"""

    @property
    def draws_during_learning(self) -> bool:
        """Whether a server draws later rounds while the peer learns."""
        return bool(self.rounds.ahead and self.policy.server and self.policy.serving.overlap)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings of different sections that contradict each other."""
        conflicts = chain(
            self._size_conflicts(),
            self._exchange_conflicts(),
            self._learning_conflicts(),
            self._task_conflicts(),
            self._server_conflicts(),
        )
        if (first := next(conflicts, None)) is not None:
            raise ValueError(first)
        return self

    def _size_conflicts(self) -> Iterator[str]:
        rounds, size = self.rounds, self.size
        horizontal = rounds.mode == "horizontal"
        whole, unit = (rounds.group, "rounds.group") if horizontal else (rounds.prompts, "rounds.prompts")
        own = rounds.group // (size if horizontal else 1)
        if whole % size:
            yield f"{unit} = {whole} does not divide among size = {size} peers ({rounds.mode})"
        if rounds.group < 2:
            yield f"rounds.group = {rounds.group}: nothing is learned from a group of one; use 2 or more"
        for key, alone in (("rounds.gather = false", not rounds.gather), ("shadow = true", self.shadow)):
            if alone and own < 2:
                yield (
                    f"{key}: each peer writes {own} of rounds.group = {rounds.group} completions, and nothing is "
                    f"learned from a group of one; set rounds.group = {2 * size} or more, or remove {key}"
                )
        if rounds.trusted > rounds.count:
            yield (
                f"rounds.trusted = {rounds.trusted}: the run ends after rounds.count = {rounds.count}; use an earlier "
                "round"
            )
        for key, value, limit, unit in (
            ("size", size, LIMITS.peers, "peers of a board"),
            ("rounds.prompts", rounds.prompts // (1 if horizontal else size), LIMITS.groups, "problems in a message"),
            ("rounds.group", own, LIMITS.completions, "completions of one peer"),
            ("rounds.prompts x rounds.group", rounds.prompts * rounds.group, MAX_COMPLETIONS, "completions in a round"),
        ):
            if value > limit:
                yield f"{key}: {value} {unit}, but at most {limit} are allowed; reduce it"
        if self.loss.overlong > self.sampling.max_new:
            yield (
                f"loss.overlong = {self.loss.overlong} is more than sampling.max_new = {self.sampling.max_new}, the "
                "maximum length of a completion; use a smaller value"
            )

    def _exchange_conflicts(self) -> Iterator[str]:
        rounds, written = self.rounds, self.rounds.prompts // self.size
        if self.receipts.committee and not rounds.gather:
            yield "receipts.committee: peers that learn alone have nothing to agree on; remove it"
        if rounds.own is None:
            return
        if rounds.own > written:
            yield (
                f"rounds.own = {rounds.own}: each peer writes {written} groups (rounds.prompts = {rounds.prompts}, "
                f"size = {self.size}); use at most as many, or increase rounds.prompts"
            )
        if rounds.foreign and self.size == 1:
            yield f"rounds.foreign = {rounds.foreign}: there is only one peer (size = 1); set it to 0"
        if self.receipts.committee:
            yield (
                "receipts.committee: peers that draw groups (rounds.own, rounds.foreign) have different weights and "
                "recompute all rewards, so there is nothing to certify; remove it"
            )

    def _learning_conflicts(self) -> Iterator[str]:
        ahead, oldest = self.rounds.ahead, self.policy.max_staleness_rounds
        if ahead and not self.loss.bounds_staleness:
            yield (
                f"rounds.ahead = {ahead}: loss.kind = {self.loss.kind!r} has no bounded weight for completions of "
                "earlier weights; use 'f_tis', 'tis', 'f_vis', 'vis' or 'dis'"
            )
        if not (ahead or self.policy.serving.overlap):
            yield "policy.serving.overlap has no effect with rounds.ahead = 0; remove it"
        if ahead and self.policy.server and oldest > ahead:
            yield (
                f"policy.max_staleness_rounds = {oldest}: peers drop completions of weights older than rounds.ahead = "
                f"{ahead}; remove it"
            )
        if self.optim.kind != "adamw":
            yield f"optim.kind = {self.optim.kind!r}: peers of a swarm train with 'adamw'"
        if self.optim.options:
            yield "optim.options: 'adamw' has none; remove them"

    def _task_conflicts(self) -> Iterator[str]:
        voting, filtering = self.task.reward == CONSENSUS, self.defence.consensus
        why = ""
        if self.rounds.mode == "vertical":
            why = "each group is one peer's (rounds.mode = 'vertical')"
        elif not self.rounds.gather:
            why = "peers do not receive each other's completions (rounds.gather = false)"
        elif self.size == 1:
            why = "there is only one peer (size = 1)"
        if why and (voting or filtering):
            requested = "task.reward" if voting else "defence.consensus"
            yield f"{requested}: a vote needs several peers for a problem, and here {why}"
        if voting and filtering:
            yield "defence.consensus needs tests, and task.reward = 'consensus' has none; remove it"
        if self.task.max_accuracy_drop and not self.evaluate.every:
            yield (
                "task.max_accuracy_drop needs evaluations, and evaluate.every = 0 makes none; set it, for example to 5"
            )

    def _server_conflicts(self) -> Iterator[str]:
        policy = self.policy
        if not policy.server:
            if policy.serving != ServingConfig():
                yield "policy.serving has no effect without policy.server; set it to the server's URL"
            return
        if self.sampling.temperature != 1.0:
            yield (
                f"sampling.temperature = {self.sampling.temperature}: servers report log-probabilities at temperature "
                "1, which the loss needs; set it to 1, or remove policy.server"
            )
        if self.attack.kind != "none":
            yield "policy.server: a drill's attacker cannot use a server; remove it for this peer"
