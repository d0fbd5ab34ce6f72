"""The layers of the defence, one behind the other, and what each of them refused of whom."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from planaria.common.documents import Record
from planaria.swarm.checks.base import Check, Context
from planaria.swarm.checks.votes import Label
from planaria.swarm.config import DefenceConfig
from planaria.swarm.draws import derived
from planaria.swarm.records.lines import NEWCOMERS
from planaria.swarm.rollout import Rollout

Counts = dict[str, tuple[int, int]]
"""peer, or account of several → (completions examined, refused)"""


class Memory(Record):
    """What a defence knows of the rounds before: plain data, for a peer that is started again."""

    layers: dict[str, list[Counts]]
    past: dict[str, list[tuple[int, int]]]
    until: dict[str, int]
    known: list[str] = Field(default_factory=list)
    heard: dict[str, int] = Field(default_factory=dict)
    newest: int = 0


@dataclass
class Layer:
    """One check, and what it makes of every peer over the last rounds."""

    check: Check
    past: deque[Counts]
    """by account: see :mod:`planaria.swarm.checks.defence`"""

    def useless(self, most: float) -> str:
        """Why the layer cannot work here; empty if it can.

        It would refuse more than ``most`` of what the median peer sent. Fewer than half of the peers are attackers, so
        the median peer is honest, or no worse than an honest one. Strangers count as one: they could be any number.
        """
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for counts in self.past:
            for peer, (sent, refused) in counts.items():
                totals[peer][0] += sent
                totals[peer][1] += refused
        shares = [refused / sent for sent, refused in totals.values() if sent]
        median = statistics.median(shares) if shares else 0.0
        if not self.check.fallible or median <= most:
            return ""
        return f"would refuse {median:.0%} of the median peer's completions: the peers' policies differ too much"


@dataclass
class Report:
    """One round of the defence."""

    rollouts: list[Rollout]
    """all, those that were refused with layer and reason"""
    refused: dict[str, Counts] = field(default_factory=dict)
    """layer → peer → (examined, refused); of a layer that is off, what it would have refused"""
    off: dict[str, str] = field(default_factory=dict)
    """layer → why it is off"""
    aside: dict[str, str] = field(default_factory=dict)
    """peer → why it is in quarantine"""
    labels: dict[int, Label] = field(default_factory=dict)
    """problem → what most do there, if a layer asks for it and there is such"""

    @property
    def accepted(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if not rollout.layer]


def warnings(checks: Sequence[Check], context: Context, size: int) -> list[str]:
    """What of these layers will not work as one might think, in a swarm of ``size`` peers."""
    found = [warning for check in checks if (warning := check.warning(context))]
    if size == 2 and (blind := [check.name for check in checks if check.fallible]):
        found.append(
            f"with two peers no median tells whether {', '.join(blind)} can work, and the other peer may be shut out "
            "for being unlike this one; switch them off unless both start with the same weights"
        )
    return found


class Defence:
    """All layers of one peer. Its own completions go through them too: peers with equal weights then stay equal."""

    def __init__(
        self,
        config: DefenceConfig,
        checks: Sequence[Check],
        context: Context,
        founders: Collection[str] = (),
        size: int = 1,
    ) -> None:
        """``founders`` and ``size`` as in :class:`planaria.swarm.checks.defence.Standing`."""
        self.standing = Standing(founders, size, config.window, context.seed)
        self._config, self._context = config, context
        self._layers = [Layer(check, deque(maxlen=config.window)) for check in checks]
        self._quarantine = Quarantine(config.quarantine, config.window)

    def examine(self, number: int, rollouts: Sequence[Rollout]) -> Report:
        """The verdicts on round ``number``'s completions, in their order."""
        verdicts = dict(enumerate(rollouts))
        report = Report([])
        for layer in self._layers:
            standing = [place for place, verdict in verdicts.items() if not verdict.layer]
            self._pass(layer, standing, verdicts, report)
        report.aside = self._quarantine.hear(number, _counts((v.peer, v) for v in verdicts.values()))
        for place, verdict in verdicts.items():
            if not verdict.layer and (reason := report.aside.get(verdict.peer)):
                verdicts[place] = replace(verdict, layer=self._quarantine.name, reason=reason)
        report.rollouts = list(verdicts.values())
        return report

    def memory(self) -> Memory:
        past, until = self._quarantine.memory()
        known, heard, newest = self.standing.memory()
        layers = {layer.check.name: list(layer.past) for layer in self._layers}
        return Memory(layers=layers, past=past, until=until, known=known, heard=heard, newest=newest)

    def recall(self, memory: Memory) -> None:
        """Become what gave this memory; layers that it does not know begin anew."""
        for layer in self._layers:
            layer.past.clear()
            layer.past.extend(memory.layers.get(layer.check.name, []))
        self._quarantine.recall(memory.past, memory.until)
        if memory.known:  # an older planaria kept none
            self.standing.recall(memory.known, memory.heard, memory.newest)

    def _pass(self, layer: Layer, standing: list[int], verdicts: dict[int, Rollout], report: Report) -> None:
        name = layer.check.name
        found = layer.check.examine([verdicts[place] for place in standing], self._context)
        for nth, reward in found.rewards.items():
            verdicts[standing[nth]] = verdicts[standing[nth]].given(reward)
        report.labels |= found.labels
        judged = {
            place: replace(verdicts[place], layer=name, reason=found.refused[nth])
            if nth in found.refused
            else replace(verdicts[place], proven=False)
            if nth in found.unproven
            else replace(verdicts[place], passed=(*verdicts[place].passed, name))
            for nth, place in enumerate(standing)
        }
        seen = [verdict for nth, verdict in enumerate(judged.values()) if nth not in found.unproven]
        layer.past.append(_counts((verdict.counted, verdict) for verdict in seen))
        report.refused[name] = _counts((verdict.peer, verdict) for verdict in seen)
        if off := found.off or layer.useless(self._config.useless):
            report.off[name] = off
        else:
            verdicts.update(judged)


def _counts(verdicts: Iterable[tuple[str, Rollout]]) -> Counts:
    """Of verdicts, each with whom it is counted under."""
    sent: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for who, verdict in verdicts:
        sent[who] += 1
        refused[who] += bool(verdict.layer)
    return {who: (number, refused[who]) for who, number in sent.items()}


class Quarantine:
    """Sets peers aside for a while if much of what they sent over the last ``window`` rounds was refused.

    It is never permanent: that would hit an honest peer sooner or later. A peer that is set aside is still examined; if
    what it sends meanwhile is clean, it returns when its time is over.
    """

    name = "quarantine"

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold, self.window = threshold, window
        self._past: dict[str, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=window))
        self._until: dict[str, int] = {}

    def hear(self, number: int, found: Mapping[str, tuple[int, int]]) -> dict[str, str]:
        """Take note of round ``number``: peer → (sent, refused). Who is set aside in this very round, and why."""
        if not self.threshold:
            return {}
        aside = {}
        for peer, counts in found.items():
            self._past[peer].append(counts)
            sent, refused = (sum(column) for column in zip(*self._past[peer], strict=True))
            share = refused / max(1, sent)
            if share > self.threshold and number >= self._until.get(peer, 0):
                self._until[peer] = number + self.window
            if number < self._until.get(peer, 0):
                aside[peer] = f"{share:.0%} of its last {sent} were refused; set aside until round {self._until[peer]}"
        return aside

    def memory(self) -> tuple[dict[str, list[tuple[int, int]]], dict[str, int]]:
        """The last rounds of every peer, and until when each was set aside last."""
        return {peer: list(past) for peer, past in self._past.items()}, dict(self._until)

    def recall(self, past: Mapping[str, list[tuple[int, int]]], until: Mapping[str, int]) -> None:
        """Become what gave this memory."""
        self._past.clear()
        for peer, counts in past.items():
            self._past[peer].extend(counts)
        self._until = dict(until)


class Standing:
    """Known peers, by id; peers that received the same know the same. Strangers share one account until they are known.

    Ids are free. Without this rule 400 made-up peers send 100 times what four honest ones do: they set the mean of each
    group, and together have nearly all of the gradient. An id cannot be made with a past: every ``window`` rounds the
    stranger that was heard most often becomes known, and no other.
    """

    def __init__(self, founders: Collection[str], size: int, window: int, seed: int) -> None:
        """``founders``: ids known from the start; unless given, ``size`` of those who are heard first."""
        self._known, self._size, self._window, self._seed = {*founders}, size, window, seed
        self._heard: Counter[str] = Counter()
        self._next = 0

    def hear(self, number: int, heard: Collection[str]) -> Mapping[str, str]:
        """Take note of who sent something for round ``number``: peer → the account that it is counted under."""
        if not self._known:
            self._known = {*self.drawn(number, heard)[: self._size]}
        strangers = self.drawn(number, {*heard} - self._known)
        accounts = {peer: peer for peer in heard} | dict.fromkeys(strangers, NEWCOMERS)
        self._heard.update(strangers)
        patient = [peer for peer in strangers if self._heard[peer] >= self._window]
        if patient and number >= self._next:
            first = max(patient, key=lambda peer: self._heard[peer])
            self._known.add(first)
            del self._heard[first]
            self._next = number + self._window
        return accounts

    def drawn(self, number: int, peers: Collection[str]) -> list[str]:
        """Them in an order that is drawn anew in every round, the same for all peers."""
        return sorted(peers, key=lambda peer: derived(self._seed, "standing", number, peer))

    def memory(self) -> tuple[list[str], dict[str, int], int]:
        """Who is known, in how many rounds every stranger was heard, and when the next may become known."""
        return sorted(self._known), dict(self._heard), self._next

    def recall(self, known: Collection[str], heard: Mapping[str, int], until: int) -> None:
        """Become what gave this memory."""
        self._known, self._heard, self._next = {*known}, Counter(heard), until
