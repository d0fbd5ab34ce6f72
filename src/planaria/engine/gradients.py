"""How the nodes of a stage come to one gradient within a step, on the fleet: replicas exchange, shards add up."""

from __future__ import annotations

from planaria.engine.post import Post
from planaria.engine.runner import StageRunner, added
from planaria.exchange.base import Offer


def exchange_gradients(post: Post, runner: StageRunner) -> None:
    """Tell the other replicas what this one's gradient is, hear theirs, and take what the exchange makes of all."""
    outer, others = (
        post.circle.outer,
        [node for node in post.here.present.peers(post.here.node) if node != post.here.node],
    )
    own = outer.offer(runner)
    assert own.blocking is not None
    for node in others:
        post.send_share(node, own.blocking)
    heard = zip(others, post.take_shares(others, own.blocking), strict=True)
    outer.settle({post.here.node: own, **{node: Offer(said) for node, said in heard}}, post.here.node, runner)


def add_shards(post: Post, runner: StageRunner) -> None:
    """Nodes that share the microbatches of one replica add up what each has: at the first, in the order of nodes."""
    first, *others = post.here.present.peers(post.here.node)
    own = runner.share()
    if post.here.node == first:
        own = added([own, *post.take_shares(others, own)])
        for node in others:
            post.send_share(node, own)
    else:
        post.send_share(first, own)
        (own,) = post.take_shares([first], own)
    runner.absorb(own)
