"""Offers judged over all stages of a replica at once, by inner products that its own nodes tell: what a node tells, and
what offers count by what all nodes of a replica have told. Pure.

A replica's vector lies at as many nodes as it has stages. Where each stage judges by itself, who lies in one stage is
judged in that one alone, and next to nothing by its distance from others there may be much in all. A node tells the
inner products of what it hears, offer by offer; their sum over the stages is that of whole vectors. So n² numbers
travel, and never a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.exchange import message
from planaria.exchange.base import Counted, Offers, Outer, Weights
from planaria.exchange.robust import Robust
from planaria.exchange.robust.products import CHUNK, Vector, chunks

Told = Mapping[int, Mapping[int, float]]
"""what one node tells: member → member heard before, or the same → inner product"""


@dataclass(frozen=True)
class Weighing:
    """Of one exchange.

    Products are about a point r, so that distances between near vectors are no rounding. Where all members must make
    the same of a round, to the last bit, r must be the same for all: the last value of a rule that continues from it,
    or zero, since what such members say are steps from weights that they share. Members with models of their own say
    these, which differ by thousandths of their norms: r is a member's ``own`` vector.
    """

    robust: Robust
    own: bool
    last: str
    """the part of an outer state that is the value of the round before"""
    spoken: Callable[[Outer, Offers], Mapping[int, Weights]]
    """what sound offers of the round after an outer state stand for, by member"""

    def products(self, outer: Outer, said: Mapping[int, Weights], me: int, news: Collection[int]) -> Told:
        """What the node of ``me`` tells of the ``news`` among what members have ``said`` in the round after ``outer``,
        its own among that; members in the order in which they were heard, ``news`` last."""
        vectors = {member: message.pieces(weights) for member, weights in said.items()}
        about = vectors[me] if self.own else None
        if self.robust.continues:
            about = message.pieces({name: t for name, t in outer[self.last].items() if name in said[me]}) or None
        return products(vectors, news, about, me if self.own else None)

    def counted(self, stages: Sequence[Told], members: Sequence[int], me: int, draw: int) -> Counted | None:
        """What offers of ``members``, in order, count for ``me``, by what its nodes have told, stage by stage; None
        where they are too few for the rule. ``draw``: the round."""
        if len(members) < self.robust.least():
            return None
        whole = torch.zeros(len(members) + 1, len(members) + 1, dtype=torch.float64)
        for told in stages:
            whole += gram(told, members, me if self.own else None)
        return self.robust.judged(members, whole, draw)


def products(vectors: Mapping[int, Vector], news: Collection[int], about: Vector | None, own: int | None) -> Told:
    """⟨x_j − r, x_k − r⟩ of each new member j with every k up to itself, in fp64; r is ``about``, or zero. In place of
    x − r of the member ``own``, whose vector is r, stands r.

    Vectors are fp32, differences and sums fp64: |error| ≤ 2⁻⁵³ √d ‖x_j − r‖ ‖x_k − r‖ about, and a long vector touches
    no entries but its own. Each number depends on two vectors and r alone, on no order or number of threads.
    """
    members = list(vectors)
    found: dict[int, dict[int, float]] = {j: dict.fromkeys(members[: members.index(j) + 1], 0.0) for j in news}
    scratch = torch.empty(CHUNK, dtype=torch.float64)
    for _, parts in chunks([*vectors.values(), *([] if about is None else [about])]):
        r = None if about is None else parts[-1].double()
        rows = {
            member: part.double() if r is None or member == own else part.double() - r
            for member, part in zip(members, parts, strict=False)
        }
        for j, row in found.items():
            for k in row:
                row[k] += float(torch.mul(rows[j], rows[k], out=scratch[: len(rows[j])]).sum())
    return found


def gram(told: Told, members: Sequence[int], own: int | None) -> Tensor:
    """G [n + 1, n + 1] of ``members`` in order, as of :func:`~planaria.exchange.robust.products.products`, from what
    one node has told about zero or a last value, or about the vector of the member ``own``.

    :raises KeyError: when it lacks a product.
    """
    count = len(members)
    found = torch.zeros(count + 1, count + 1, dtype=torch.float64)
    for place, j in enumerate(members):
        for other, k in enumerate(members[: place + 1]):
            found[place, other] = found[other, place] = told[j][k] if k in told[j] else told[k][j]
    if own is not None:  # what stands in its place is r, and its own difference from r is zero
        place = members.index(own)
        about = found[place].clone()
        found[place] = found[:, place] = 0.0
        found[count, count], about[place] = about[place].clone(), 0.0
        found[count, :count] = found[:count, count] = about[:count]
    return found
