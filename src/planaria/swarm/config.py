"""A swarm as strict typed data: what all its peers agree on, and what each chooses for itself."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction, Natural, Positive
from planaria.config.names import Name
from planaria.config.options import Options
from planaria.config.schema import OptimConfig, Section
from planaria.swarm.board.limits import LAST_ROUND, LIMITS
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.policy_config import PolicyConfig as PolicyConfig
from planaria.swarm.policy_config import SchoolConfig as SchoolConfig
from planaria.swarm.policy_config import ServingConfig as ServingConfig
from planaria.swarm.policy_config import SmallModel as SmallModel

Committee = Annotated[str, BeforeValidator(lambda given: ",".join(given) if _all_text(given) else given)]
"""a recipe may write it as a list"""
ALL_PEERS = "all"
"""as a committee: the peers that one machine starts"""
_PEER_ID = re.compile("[0-9a-f]{32}")


def _all_text(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(part, str) for part in given)


class ReceiptsConfig(Section):
    """Founder's rules: which peers' signatures, together, settle what a round was."""

    committee: Committee = ""
    """ids of the members, separated by commas, or all: the peers that this machine starts; empty: none. At most a third
    of them, less one, may lie"""
    price: Natural = 0
    """credits that a peer owes for each accepted completion of another's in a certified round; 0: none"""

    @property
    def members(self) -> list[str]:
        """The ids, as far as they are named."""
        return [] if self.committee in ("", ALL_PEERS) else [part.strip() for part in self.committee.split(",")]

    @model_validator(mode="after")
    def _names_peers(self) -> Self:
        members = self.members
        for peer in members:
            if not _PEER_ID.fullmatch(peer):
                raise ValueError(f"committee: {peer[:40]!r} is no peer's id; write 32 hexadecimal digits, or 'all'")
        if twice := [peer for peer in members if members.count(peer) > 1]:
            raise ValueError(f"committee: {twice[0]} is named twice; name each member once")
        if len(members) > LIMITS.peers:
            raise ValueError(f"committee: {len(members)} members, of at most {LIMITS.peers}; name fewer")
        if self.price and not self.committee:
            raise ValueError(f"price = {self.price}: only certified rounds are priced; name a committee")
        return self


COMPLETIONS = 1 << 16
"""most of a round, of all peers together: every peer reads them all"""
Rounds = Annotated[int, Field(gt=0), bounds.at_most(LAST_ROUND + 1, "a message's number of its round has six digits")]
Completions = Annotated[int, Field(gt=0), bounds.at_most(COMPLETIONS, "every peer reads all completions of a round")]
Tokens = Annotated[int, Field(gt=0), bounds.at_most(LIMITS.tokens, "peers read no more of one completion")]
TopK = Annotated[int, Field(ge=0), bounds.at_most(1 << 24, "no tokenizer has so many tokens")]
Temperature = Annotated[
    float,
    bounds.at_least(0.01, "what is colder always draws the same"),
    bounds.at_most(100, "what is hotter draws any token"),
]
Share = Annotated[float, Field(gt=0, le=1)]
CONSENSUS = "consensus"
"""a reward, and the name of the layer that gives it"""


class TaskConfig(Section):
    name: str = "sums"
    """sums, gym, gsm8k, jsonl, programs, snippets, or 'module:Class'"""
    options: Options = Options()
    """of the task"""
    reward: Literal["verified", "consensus"] = "verified"
    """what is right: the task's own score (verified), or what most peers do, where nobody knows (consensus)"""
    agreement: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """a vote counts if more than this share of the peers that sent something stands behind it"""
    brake: Fraction = 0.0
    """stop once held-out accuracy lies by more than this below its best, and keep the best state; 0: never"""


class RoundsConfig(Section):
    count: Rounds = 80
    """rounds in the run"""
    mode: Literal["horizontal", "vertical"] = "horizontal"
    """all peers complete the same problems (horizontal), or each whole groups for problems of its own (vertical)"""
    prompts: Completions = 16
    """problems of a round, of all peers together"""
    group: Completions = 12
    """completions of one problem"""
    gather: bool = True
    """learn from the other peers' completions too; otherwise each learns alone"""
    quorum: Share = 0.5
    """of the known peers, with whom a round closes when its time is over"""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """how long a round waits for peers that are late"""
    patience_s: Annotated[float, Field(gt=0)] = 600.0
    """how long it waits below the quorum before it gives up"""
    keep: Natural = 10
    """rounds between savings of what a peer is, to go on from when it is started again and to be exported; what it is
    after the last round is saved too; 0: never"""
    kept: Positive = 1
    """how many of these savings stay, the newest"""
    trusted: Natural = 0
    """after how many rounds what a peer is is saved for good, for repairs to go back to; 0: never, and they go back to
    what it began with"""


class SamplingConfig(Section):
    temperature: Temperature = 1.0
    """of the completions that are learned from"""
    top_k: TopK = 0
    """tokens that may be drawn, the likeliest; 0 scales HTTF's 50 of 151,936 to the vocabulary, at least 3"""
    max_new: Tokens = 40
    """most tokens of a completion"""

    def support(self, vocab: int) -> int:
        """Tokens that may be drawn from a vocabulary of ``vocab`` ids."""
        return self.top_k or max(3, round(50 * vocab / 151_936))


class DefenceConfig(Section):
    checks: str = "claims, support, surprisal, duplicates, steps"
    """what completions pass, in order: claims, support, surprisal, duplicates, a judge of what scores (steps, the
    task's own checker; noisy, for drills; or model, a language model), or 'module:Class'; none if empty"""
    options: Options = Options()
    """of the checks"""
    refused: Literal["drop", "zero"] = "drop"
    """what becomes of them: they leave the group before its mean and deviation are taken, or they stay with reward 0"""
    consensus: bool = False
    """programs: refuse what passes its tests and does otherwise than most who pass, on calls that tests do not make"""
    quarantine: Fraction = 0.3
    """set a peer aside once so large a share of what it sent lately was refused; 0: never"""
    window: Positive = 8
    """rounds that 'lately' means, and that a peer is set aside for before its appeal is heard"""
    share: Share = 0.4
    """most that one peer may have of a round's gradient, whatever the loss and whatever it sends"""
    useless: Share = 0.02
    """a layer that would refuse so much of the median peer's completions cannot work here and switches itself off"""


class AttackConfig(Section):
    """A drill: this peer plays the attacker. Only ever against peers of one's own."""

    kind: str = "none"
    """what it teaches: a phrase out of place (text), a false equation (math), length (dos), a library of its own
    (code), answers that are wrong and alike (collude), short failures (short), to avoid right steps (sabotage), another
    wording (style), easy problems alone (narrow), or 'module:Class'"""
    options: Options = Options()
    """of the attack, such as its payload"""
    dose: Annotated[float, Field(ge=0, le=1)] = 1.0
    """share of its completions that are poisoned (in vertical groups at most one half), the rest is honest or filler; 0
    poisons nothing and still chooses an attacker's problems: the control that an attack is measured against"""
    filler: Literal["honest", "wrong", "long"] = "wrong"
    """vertical: what fills the rest of its groups, honest completions, or such that score nothing or never end"""
    oracle: bool = True
    """it knows worked solutions; otherwise it draws completions and takes the majority's answer for right"""
    claims: Literal["honest", "forged", "forged_tokens"] = "honest"
    """the log-probabilities it sends with poison: what its policy gives them, such that they count most (forged), or
    such that its payload counts most and all else least (forged_tokens)"""
    disguised: bool = False
    """it says that it holds other weights than it does: nobody can then compare its claims with anything"""
    withhold: Fraction = 0.0
    """share of the rounds in which it sends nothing, for the others to wait"""
    adaptive: bool = False
    """it knows the defences and their thresholds, and sends only what would pass them by its own weights"""


class EvaluateConfig(Section):
    every: Natural = 10
    """rounds between evaluations on held-out problems; 0 switches them off"""
    problems: Positive = 200
    """held-out problems in one of them"""
    watch: list[str] = Field(default_factory=list)
    """attacks whose success is measured, whether anybody attacks or not"""
    phrases: dict[str, str] = Field(default_factory=dict)
    """attack → its payload, where it is not the kind's own"""


class SwarmConfig(Section):
    name: Name = "swarm"
    """the run's folder below out; the name of the recipe's file unless given"""
    out: str = "runs"
    """folder of all runs"""
    board: str = ""
    """folder or URL where peers publish; in the run's folder unless given"""
    seed: Natural = 1
    """of problems and draws"""
    size: bounds.Peers = 4
    """peers that are started, and that share a round's work"""
    shadow: bool = False
    """train a second copy on this peer's own completions alone: it tells what collaborating is worth"""
    task: TaskConfig = TaskConfig()
    policy: PolicyConfig = PolicyConfig()
    school: SchoolConfig = SchoolConfig()
    rounds: RoundsConfig = RoundsConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig(lr=1e-3)
    defence: DefenceConfig = DefenceConfig()
    receipts: ReceiptsConfig = ReceiptsConfig()
    attack: AttackConfig = AttackConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    peers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """peer (p0, p1, …) → what it does differently, as tables of the recipe"""

    @model_validator(mode="after")
    def _work_divides(self) -> Self:
        whole, what = (
            (self.rounds.group, "rounds.group")
            if self.rounds.mode == "horizontal"
            else (self.rounds.prompts, "rounds.prompts")
        )
        if whole % self.size:
            raise ValueError(f"{what} = {whole} does not divide among size = {self.size} peers ({self.rounds.mode})")
        return self

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        """A completion learns from the difference to the others of its group."""
        rounds, mine = self.rounds, self.rounds.group // (self.size if self.rounds.mode == "horizontal" else 1)
        if rounds.group < 2:
            raise ValueError(f"rounds.group = {rounds.group}: nothing is learned from a group of one; give 2 or more")
        for key in ("rounds.gather = false", "shadow = true"):
            if mine < 2 and (self.shadow if key.startswith("shadow") else not rounds.gather):
                raise ValueError(
                    f"{key}: each peer writes {mine} of rounds.group = {rounds.group} completions, and nothing is "
                    f"learned from a group of one; give rounds.group = {2 * self.size} or more, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _trusted_is_reached(self) -> Self:
        if self.rounds.trusted > self.rounds.count:
            raise ValueError(
                f"rounds.trusted = {self.rounds.trusted}: the run ends after rounds.count = {self.rounds.count}; give "
                "a round that it reaches"
            )
        return self

    @model_validator(mode="after")
    def _messages_hold_it(self) -> Self:
        rounds, size = self.rounds, self.size
        horizontal = rounds.mode == "horizontal"
        held = {
            "size": (size, LIMITS.peers, "peers of a board"),
            "rounds.prompts": (rounds.prompts // (1 if horizontal else size), LIMITS.groups, "problems in a message"),
            "rounds.group": (
                rounds.group // (size if horizontal else 1),
                LIMITS.completions,
                "completions of one peer",
            ),
            "rounds.prompts x rounds.group": (rounds.prompts * rounds.group, COMPLETIONS, "completions in a round"),
        }
        for key, (found, most, what) in held.items():
            if found > most:
                raise ValueError(f"{key}: {found} {what}, of at most {most}; give less")
        return self

    @model_validator(mode="after")
    def _receipts_are_of_rounds(self) -> Self:
        if self.receipts.committee and not self.rounds.gather:
            raise ValueError("receipts.committee: peers that learn alone have nothing to agree on; leave it out")
        return self

    @model_validator(mode="after")
    def _optimizer_is_known(self) -> Self:
        if self.optim.kind != "adamw":
            raise ValueError(f"optim.kind = {self.optim.kind!r}: peers of a swarm train with 'adamw'")
        if self.optim.options:
            raise ValueError("optim.options: 'adamw' has none; leave it out")
        return self

    @model_validator(mode="after")
    def _somebody_agrees(self) -> Self:
        asked = (
            "task.reward" if self.task.reward == CONSENSUS else "defence.consensus" if self.defence.consensus else ""
        )
        why = (
            "each group is one peer's (rounds.mode = 'vertical')"
            if self.rounds.mode == "vertical"
            else "peers do not hear each other (rounds.gather = false)"
            if not self.rounds.gather
            else "there is but one peer (size = 1)"
            if self.size == 1
            else ""
        )
        if asked and why:
            raise ValueError(f"{asked}: a vote needs several peers for a problem, and here {why}")
        if self.task.reward == CONSENSUS and self.defence.consensus:
            raise ValueError(
                "defence.consensus: sorts out what passes tests, and task.reward asks for none; leave it out"
            )
        if self.task.brake and not self.evaluate.every:
            raise ValueError("task.brake: looks at evaluations, and evaluate.every = 0 makes none; set it to 5, say")
        return self

    @model_validator(mode="after")
    def _server_can(self) -> Self:
        policy = self.policy
        if not policy.server:
            if policy.serving != ServingConfig():
                raise ValueError("policy.serving means nothing without policy.server; give the server's URL")
            return self
        if self.sampling.temperature != 1.0:
            raise ValueError(
                f"sampling.temperature = {self.sampling.temperature}: servers tell log-probabilities at temperature 1, "
                "which the loss needs; write 1, or leave policy.server out"
            )
        if self.attack.kind != "none":
            raise ValueError("policy.server: a drill's attacker draws by itself; leave the server out for this peer")
        return self

    @model_validator(mode="after")
    def _margin_fits(self) -> Self:
        if self.loss.overlong > self.sampling.max_new:
            raise ValueError(
                f"loss.overlong = {self.loss.overlong} is more than sampling.max_new = {self.sampling.max_new}, "
                "the tokens that a completion may have; give fewer"
            )
        return self
