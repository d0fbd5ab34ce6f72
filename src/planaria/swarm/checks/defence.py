"""The defence: layers in sequence, quarantine, and accounts of unknown peers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from planaria.common.documents import Record, former_names
from planaria.swarm.checks.base import Check, Context
from planaria.swarm.checks.votes import MajorityLabel
from planaria.swarm.config.swarm_config import DefenceConfig
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.records.lines import UNKNOWN_PEERS

Counts = dict[str, tuple[int, int]]
"""peer, or the shared account of unknown peers → (completions examined, rejected)"""


class DefenceState(Record):
    """State of a defence, as plain data for a restarted peer."""

    _former = former_names(received="heard", next_admission="newest")
    layers: dict[str, list[Counts]]
    past: dict[str, list[tuple[int, int]]]
    until: dict[str, int]
    known: list[str] = Field(default_factory=list)
    received: dict[str, int] = Field(default_factory=dict)
    next_admission: int = 0
    """first round that may make an unknown peer known"""


@dataclass
class Layer:
    """One check and its counts over the last rounds."""

    check: Check
    past: deque[Counts]
    """counts by account, as in :class:`PeerAccounts`"""

    def why_disabled(self, limit: float) -> str:
        """Return why the layer cannot work here, or an empty string if it can.

        It would reject more than ``limit`` of the median peer's completions, over the known peers with completions in
        the window. If fewer than half of these are attackers, the median peer is at most as bad as an honest one, so
        attackers cannot switch the layer off. Of an even number of peers, the worse of the two in the middle counts:
        the reader's own completions are never improbable, and an adaptive attacker's need not be, so the mean of both
        would understate the rejections of honest peers. The account of unknown peers does not count, since ids are
        free: with it, one attacker among three known peers and one invented id would be half of the accounts.
        """
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for counts in self.past:
            for peer, (sent, rejected) in counts.items():
                if peer == UNKNOWN_PEERS:
                    continue
                totals[peer][0] += sent
                totals[peer][1] += rejected
        shares = [rejected / sent for sent, rejected in totals.values() if sent]
        median = statistics.median_high(shares) if shares else 0.0
        if not self.check.fallible or median <= limit:
            return ""
        return f"would reject {median:.0%} of the median peer's completions: the peers' policies differ too much"


@dataclass
class DefenceReport:
    """Findings of all layers in a round."""

    rollouts: list[Rollout]
    """all completions; rejected ones with layer and reason"""
    rejected: dict[str, Counts] = field(default_factory=dict)
    """layer → peer → (examined, rejected); for a layer that is off, what it would have rejected"""
    off: dict[str, str] = field(default_factory=dict)
    """layer → why it is off"""
    quarantined: dict[str, str] = field(default_factory=dict)
    """peer → why it is in quarantine"""
    labels: dict[int, MajorityLabel] = field(default_factory=dict)
    """problem → label, if a layer votes and finds one"""

    @property
    def accepted(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if not rollout.layer]


def configuration_warnings(checks: Sequence[Check], context: Context, size: int) -> list[str]:
    """Return warnings about these layers in a swarm of ``size`` peers."""
    result = [warning for check in checks if (warning := check.warning(context))]
    if size == 2 and (blind := [check.name for check in checks if check.fallible]):
        result.append(
            f"with two peers, {', '.join(blind)} cannot be calibrated and may exclude the other peer; disable them "
            "unless both start with the same weights"
        )
    return result


class Defence:
    """All layers of one peer, applied to its own completions too, so that peers with equal weights stay equal."""

    def __init__(
        self,
        config: DefenceConfig,
        checks: Sequence[Check],
        context: Context,
        founders: Collection[str] = (),
        size: int = 1,
    ) -> None:
        """See :class:`planaria.swarm.checks.defence.PeerAccounts` for ``founders`` and ``size``."""
        self.accounts = PeerAccounts(founders, size, config.window, context.seed)
        self._config, self._context = config, context
        self._layers = [Layer(check, deque(maxlen=config.window)) for check in checks]
        self._quarantine = Quarantine(config.quarantine, config.window)

    def examine(self, round_number: int, rollouts: Sequence[Rollout]) -> DefenceReport:
        """Return the verdicts on a round's completions, in order."""
        verdicts = dict(enumerate(rollouts))
        report = DefenceReport([])
        for layer in self._layers:
            accepted = [index for index, verdict in verdicts.items() if not verdict.layer]
            self._apply_layer(layer, accepted, verdicts, report)
        report.quarantined = self._quarantine.update(
            round_number, _count_by_name((v.peer, v) for v in verdicts.values())
        )
        for index, verdict in verdicts.items():
            if not verdict.layer and (reason := report.quarantined.get(verdict.peer)):
                verdicts[index] = replace(verdict, layer=self._quarantine.name, reason=reason)
        report.rollouts = list(verdicts.values())
        return report

    def state(self) -> DefenceState:
        accounts, quarantine = self.accounts, self._quarantine
        return DefenceState(
            layers={layer.check.name: list(layer.past) for layer in self._layers},
            past={peer: list(past) for peer, past in quarantine.past.items()},
            until=dict(quarantine.until),
            known=sorted(accounts.known),
            received=dict(accounts.received),
            next_admission=accounts.next_admission,
        )

    def load_state(self, memory: DefenceState) -> None:
        for layer in self._layers:
            layer.past.clear()
            layer.past.extend(memory.layers.get(layer.check.name, []))
        self._quarantine.past.clear()
        for peer, counts in memory.past.items():
            self._quarantine.past[peer].extend(counts)
        self._quarantine.until = dict(memory.until)
        if memory.known:  # older versions saved none
            self.accounts.known, self.accounts.received = {*memory.known}, Counter(memory.received)
            self.accounts.next_admission = memory.next_admission

    def _apply_layer(
        self, layer: Layer, accepted: list[int], verdicts: dict[int, Rollout], report: DefenceReport
    ) -> None:
        name = layer.check.name
        result = layer.check.examine([verdicts[index] for index in accepted], self._context)
        for nth, reward in result.rewards.items():
            verdicts[accepted[nth]] = verdicts[accepted[nth]].with_vote_reward(reward)
        report.labels |= result.labels
        judged = {
            index: replace(verdicts[index], layer=name, reason=result.rejected[nth])
            if nth in result.rejected
            else replace(verdicts[index], proven=False)
            if nth in result.unproven
            else replace(verdicts[index], passed=(*verdicts[index].passed, name))
            for nth, index in enumerate(accepted)
        }
        seen = [verdict for nth, verdict in enumerate(judged.values()) if nth not in result.unproven]
        layer.past.append(_count_by_name((verdict.effective_account, verdict) for verdict in seen))
        report.rejected[name] = _count_by_name((verdict.peer, verdict) for verdict in seen)
        if off := result.off or layer.why_disabled(self._config.max_median_rejection):
            report.off[name] = off
        else:
            verdicts.update(judged)


def _count_by_name(verdicts: Iterable[tuple[str, Rollout]]) -> Counts:
    sent: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for name, verdict in verdicts:
        sent[name] += 1
        rejected[name] += bool(verdict.layer)
    return {name: (count, rejected[name]) for name, count in sent.items()}


class Quarantine:
    """Exclude a peer for ``window`` rounds if more than ``threshold`` of its last ``window`` rounds was rejected.

    Exclusion is never permanent, since honest peers are hit by chance. An excluded peer is still examined and returns
    if its completions are clean.
    """

    name = "quarantine"

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold, self.window = threshold, window
        self.past: dict[str, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=window))
        """peer → (sent, rejected) of its last rounds"""
        self.until: dict[str, int] = {}
        """peer → end of its last exclusion"""

    def update(self, round_number: int, values: Mapping[str, tuple[int, int]]) -> dict[str, str]:
        """Record a round (peer → (sent, rejected)); return the peers excluded in it, with the reason."""
        if not self.threshold:
            return {}
        quarantined = {}
        for peer, counts in values.items():
            self.past[peer].append(counts)
            sent, rejected = (sum(column) for column in zip(*self.past[peer], strict=True))
            share = rejected / max(1, sent)
            if share > self.threshold and round_number >= self.until.get(peer, 0):
                self.until[peer] = round_number + self.window
            if round_number < self.until.get(peer, 0):
                quarantined[peer] = (
                    f"{share:.0%} of its last {sent} were rejected; excluded until round {self.until[peer]}"
                )
        return quarantined


class PeerAccounts:
    """Accounts of peers: known peers have their own, and all unknown peers share one.

    Anyone can create ids. Without this rule, 400 invented peers would outnumber four honest ones 100 to 1, set each
    group's mean and have nearly all of the gradient. A history cannot be invented: every ``window`` rounds, only the
    unknown peer received most often becomes known. Peers that received the same messages have the same accounts.
    """

    def __init__(self, founders: Collection[str], size: int, window: int, seed: int) -> None:
        """``founders`` are known from the start; without founders, ``size`` peers of the first round are."""
        self.known = {*founders}
        self._size = size
        self._window = window
        self._seed = seed
        self.received: Counter[str] = Counter()
        """unknown peer → number of rounds"""
        self.next_admission = 0
        """first round that may make an unknown peer known"""

    def record_senders(self, round_number: int, received: Collection[str]) -> Mapping[str, str]:
        """Record the peers received in a round; return peer → the account it is counted under."""
        if not self.known:
            self.known = {*self.draw_order(round_number, received)[: self._size]}
        unknown = self.draw_order(round_number, {*received} - self.known)
        accounts = {peer: peer for peer in received} | dict.fromkeys(unknown, UNKNOWN_PEERS)
        self.received.update(unknown)
        patient = [peer for peer in unknown if self.received[peer] >= self._window]
        if patient and round_number >= self.next_admission:
            first = max(patient, key=lambda peer: self.received[peer])
            self.known.add(first)
            del self.received[first]
            self.next_admission = round_number + self._window
        return accounts

    def draw_order(self, round_number: int, peers: Collection[str]) -> list[str]:
        """Return the peers in an order that is redrawn every round, the same on all peers."""
        return sorted(peers, key=lambda peer: derive_seed(self._seed, "standing", round_number, peer))
