"""Replicas by the thousand for ``benchmarks.exchange_scale``: how long their rounds take, and how well they learn.

The clock draws what steps and messages take, and carries lateness on from round to round. Learning is real: every
replica trains a net of 64-32-10 on a few handwritten digits of its own, and rounds are planaria's own exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.exchange.base import Exchange
    from planaria.exchange.lab import Replica

HIDDEN, CLASSES, HELD_OUT = 32, 10, 397
OWN, BATCH = 16, 4
"""images that a replica has, drawn for it; of a step"""


@dataclass(frozen=True)
class Method:
    """One way to agree: the exchange's name and options, and what carries its messages."""

    name: str
    carrier: str
    """a collective of :mod:`planaria.pipeline.network.collectives`, or ``pairs``"""
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    """of the exchange; empty: none"""

    @property
    def every(self) -> int:
        """Inner steps from round to round; 0: in every step; -1: never."""
        found: int = self.options.get("every", 0 if self.carrier else -1)
        return found // int(self.options.get("fragments", 1))


@dataclass(frozen=True)
class Place:
    """Where replicas stand: what a step takes and what a message takes there."""

    name: str
    step_s: float
    """median of one replica's step"""
    step_sigma: float
    """of its logarithm, from step to step"""
    bytes: float
    """of the weights, or of a step's gradients"""
    rate: float
    """median bytes a second of a replica's link"""
    rate_sigma: float
    """of its logarithm, from replica to replica"""
    latency_s: float
    latency_sigma: float


def clock(place: Place, method: Method, n: int, steps: int, seed: int, free: bool = False) -> float:
    """Seconds a step, lateness of all rounds included; ``free``: messages take no time, so others' lateness is left."""
    from planaria.exchange.gossip import random_groups
    from planaria.pipeline.network.collectives import COLLECTIVES, Links, pairs

    drawn = np.random.default_rng([seed, n])
    rate = np.full(n, np.inf) if free else place.rate * drawn.lognormal(0.0, place.rate_sigma, n)
    links = Links(rate, 0.0 if free else place.latency_s, place.latency_sigma, np.random.default_rng([seed, n, 1]))
    every, late = method.every, int(method.options.get("delay", 0))
    said = place.bytes * method.options.get("bits", 32) / 32 / method.options.get("fragments", 1)
    now, coming = np.zeros(n), None
    for step in range(1, steps + 1):
        now = now + place.step_s * drawn.lognormal(0.0, place.step_sigma, n)
        if coming is not None and step == coming[0]:
            now, coming = np.maximum(now, coming[1]), None
        if every < 0 or step % max(1, every):
            continue
        if method.carrier == "pairs":
            heard = pairs(now, said, links, random_groups(step, range(n), 2, seed))
        else:
            heard = COLLECTIVES[method.carrier](now, said, links)
        if late:
            coming = step + late, heard
        else:
            now = heard
    return float(now.max()) / steps


class Digits:
    """The images, and ``n`` replicas' nets side by side: every weight has a first axis of replicas."""

    def __init__(self, n: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(found.data, dtype=torch.float32)[order] / 16
        labels = torch.tensor(found.target)[order]
        self.images, self.labels = images[HELD_OUT:], labels[HELD_OUT:]
        self.unseen = images[:HELD_OUT], labels[:HELD_OUT]
        draw = torch.Generator().manual_seed(seed)
        first = torch.randn(64, HIDDEN, generator=draw) / 8
        second = torch.randn(HIDDEN, CLASSES, generator=draw) / HIDDEN**0.5
        begin = {"a": first, "b": torch.zeros(HIDDEN), "c": second, "d": torch.zeros(CLASSES)}
        self.n, self.draw = n, draw
        self.own = torch.randint(len(self.images), (n, OWN), generator=draw)
        self.weights = {name: w.expand(n, *w.shape).clone() for name, w in begin.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Of every replica's own batch."""
        rows = self.own.gather(1, torch.randint(OWN, (self.n, BATCH), generator=self.draw))
        x, y = self.images[rows], self.labels[rows]
        w = self.weights
        before = torch.baddbmm(w["b"].unsqueeze(1), x, w["a"])
        hidden = before.relu()
        logits = torch.baddbmm(w["d"].unsqueeze(1), hidden, w["c"])
        wrong = (logits.softmax(-1) - torch.nn.functional.one_hot(y, CLASSES)) / BATCH
        back = (wrong @ w["c"].transpose(1, 2)) * (before > 0)
        return {
            "a": x.transpose(1, 2) @ back,
            "b": back.sum(1),
            "c": hidden.transpose(1, 2) @ wrong,
            "d": wrong.sum(1),
        }

    def loss(self) -> float:
        """Of the mean model, on images that nobody trains on."""
        x, y = self.unseen
        w = {name: value.mean(0) for name, value in self.weights.items()}
        logits = (x @ w["a"] + w["b"]).relu() @ w["c"] + w["d"]
        return float(torch.nn.functional.cross_entropy(logits, y))


def losses(method: Method, n: int, rate: float, steps: int, seed: int) -> Iterator[float]:
    """The mean model's loss after each step of SGD with momentum 0.9 at ``rate``."""
    from planaria.exchange import EXCHANGES
    from planaria.exchange.lab import Replica, settle

    nets, velocity = Digits(n, seed), dict[str, Any]()
    options = {name: value for name, value in method.options.items() if name != "bits"}
    agreed: Exchange | None = EXCHANGES.make(method.kind, options) if method.kind else None
    of = {i: Replica(_row(nets, i), agreed.start(_row(nets, i))) for i in range(n)} if agreed else {}
    coming: Any = None
    for step in range(1, steps + 1):
        found = nets.gradients()
        if method.every == 0:
            found = {name: g.mean(0, keepdim=True).expand_as(g) for name, g in found.items()}
        for name, g in found.items():
            velocity[name] = 0.9 * velocity.get(name, 0.0) + g
            nets.weights[name] = nets.weights[name] - rate * velocity[name]
        if agreed is not None and (due := step % method.every == 0 or (coming and step == coming[0])):
            _fetch(nets, of)
        if agreed is not None and step % method.every == 0:
            coming = step + agreed.overlap, _heard(method, agreed, of, step // method.every - 1, seed)
        if agreed is not None and due and step == coming[0]:
            settle(agreed, of, coming[1])
            nets.weights = {name: torch.stack([of[i].fast[name] for i in range(n)]) for name in nets.weights}
        yield nets.loss()


def _heard(method: Method, agreed: Exchange, of: dict[int, Replica], round: int, seed: int) -> Any:
    """What each has heard in a round. Where all hear all, each is given their mean as if it were alone: adding up a
    thousand offers at each of a thousand replicas comes to the same."""
    from planaria.exchange.base import Offer
    from planaria.exchange.lab import offers

    if method.carrier == "pairs":
        return offers(agreed, of, round, seed)
    said = [agreed.offer(replica.outer, replica.fast).blocking for replica in of.values()]
    mean = torch.stack([one for one in said if one is not None]).mean(0)
    return {i: {i: Offer(mean)} for i in of}


def _fetch(nets: Digits, of: Mapping[int, Replica]) -> None:
    for i, replica in of.items():
        replica.fast = _row(nets, i)


def _row(nets: Digits, i: int) -> dict[str, Tensor]:
    return {name: value[i].clone() for name, value in nets.weights.items()}


def steps_to(target: float, found: Iterator[float]) -> float:
    """Steps until the loss is at most ``target``; infinite if it never is."""
    return next((float(step) for step, loss in enumerate(found, 1) if loss <= target), float("inf"))
