"""How the nodes of a stage come to one gradient within a step, on the fleet: replicas exchange, shards add up."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from planaria.config.schema import ModelConfig, RunConfig
from planaria.control import events as e
from planaria.exchange.base import Offer
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.engine.post import Post
from planaria.runtime.engine.runner import StageRunner, added


def agree(config: RunConfig, post: Post, runner: StageRunner, spans: list[e.Span]) -> None:
    """The nodes of a stage come to one gradient, where it has several; what that took is added to ``spans``."""
    nodes = adding(post.here.present, config.model, post.here.node)
    if len(nodes) == 1:
        return
    post.desk.at("exchange", post.here.step)
    start = time.monotonic()
    if config.exchange.replicas > 1:
        exchange_gradients(post, runner)
    else:
        add_shards(post, runner, nodes)
    spans.append(e.Span(action="exchange", start=start, end=time.monotonic()))


def exchange_gradients(post: Post, runner: StageRunner) -> None:
    """Tell the other replicas what this one's gradient is, hear theirs, and take what the exchange makes of all.

    Report whose was of no use; the first replica's nodes, what each of the others counted.
    """
    outer, here = post.circle.outer, post.here
    replicas = dict(enumerate(here.present.peers(here.node)))
    me = next(replica for replica, node in replicas.items() if node == here.node)
    others = {replica: node for replica, node in replicas.items() if replica != me}
    own = outer.offer(runner, me)
    at = here.step, outer.settled.rounds
    said = outer.publisher.updates(own, outer.exchange.codec(outer.settled), at, me, others)
    for replica, node in others.items():
        post.send_share(node, _blocking(said[replica]))
    heard = [*zip(others, post.take_shares([*others.values()], None), strict=True)]
    post.desk.at("settle", here.step)
    verdict = outer.settle({me: said[me], **{replica: Offer(flat) for replica, flat in heard}}, me, runner)
    post.report(verdict, here.step, first=me == 0)


def _blocking(offer: Offer) -> Tensor:
    assert offer.blocking is not None
    return offer.blocking


def adding(there: Arrangement, model: ModelConfig, node: int) -> tuple[int, ...]:
    """The nodes that have the parameters of ``node``: those of its stage, or all where every stage has all of them."""
    return tuple(there.stage) if model.one_array else there.peers(node)


def add_shards(post: Post, runner: StageRunner, nodes: Sequence[int]) -> None:
    """``nodes`` with the same parameters add up what each has of a step: at the first, in their order."""
    first, *others = nodes
    own = runner.share()
    if post.here.node == first:
        own = added([own, *post.take_shares(others, own)])
        for node in others:
            post.send_share(node, own)
    else:
        post.send_share(first, own)
        (own,) = post.take_shares([first], own)
    runner.absorb(own)
