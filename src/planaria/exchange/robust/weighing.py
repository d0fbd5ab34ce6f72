"""Weights of updates over all stages of a replica, from inner products that its nodes compute. Pure.

A replica's vector is spread over one node per stage. If each stage judged alone, a replica corrupted in one stage would
be judged there only, and small distances per stage may add up. Each node computes the inner products of the updates it
receives; their sums over the stages are those of whole vectors. So n² numbers travel instead of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.exchange import weight_message
from planaria.exchange.base import StageOuterState, Updates, UpdateWeights, Weights
from planaria.exchange.robust.products import CHUNK, Vector, iter_chunks
from planaria.exchange.robust.rules import RobustAggregator

Products = Mapping[int, Mapping[int, float]]
"""inner products of one node: member → member received earlier, or itself → product"""


@dataclass(frozen=True)
class Weighing:
    """Weighting for one exchange.

    Products are about a point r, so that distances between near vectors exceed rounding errors. If all members need
    bit-identical results, r must be equal at all: the last value of an iterative rule, or zero, since such members send
    steps from shared weights. Members with models of their own send these, which differ by thousandths of their norms:
    r is a member's ``own`` vector.
    """

    robust: RobustAggregator
    own: bool
    last: str
    """the part of an outer state that holds the previous round's value"""
    decoded_values: Callable[[StageOuterState, Updates], Mapping[int, Weights]]
    """decodes the valid updates of the round after an outer state, by member"""

    def products(
        self, outer: StageOuterState, decoded: Mapping[int, Weights], me: int, new: Collection[int]
    ) -> Products:
        """Return the inner products that ``me``'s node reports for the members ``new`` in the round after ``outer``.

        ``decoded`` holds all vectors in order of arrival, its own included and ``new`` last.
        """
        vectors = {member: weight_message.pieces(weights) for member, weights in decoded.items()}
        about = vectors[me] if self.own else None
        if self.robust.is_iterative:
            about = (
                weight_message.pieces({name: t for name, t in outer[self.last].items() if name in decoded[me]}) or None
            )
        return stage_products(vectors, new, about, me if self.own else None)

    def update_weights(
        self, stages: Sequence[Products], members: Sequence[int], me: int, draw: int
    ) -> UpdateWeights | None:
        """Return the weights of the updates of ``members``, in order, from the products of each stage, or None if they
        are fewer than the rule's least number.

        :param draw: the round.
        """
        if len(members) < self.robust.min_members():
            return None
        whole = torch.zeros(len(members) + 1, len(members) + 1, dtype=torch.float64)
        for node_products in stages:
            whole += gram(node_products, members, me if self.own else None)
        return self.robust.weigh_members(members, whole, draw)


def stage_products(
    vectors: Mapping[int, Vector], new: Collection[int], about: Vector | None, own: int | None
) -> Products:
    """Return ⟨x_j − r, x_k − r⟩ of each new member j with every k up to itself, in fp64; r is ``about``, or zero.

    Row ``own``, whose vector is r, holds products with r itself. Vectors are fp32, differences and sums fp64:
    |error| ≤ 2⁻⁵³ √d ‖x_j − r‖ ‖x_k − r‖, approximately. Each number depends only on two vectors and r, not on order or
    threads.
    """
    members = list(vectors)
    inner_products: dict[int, dict[int, float]] = {j: dict.fromkeys(members[: members.index(j) + 1], 0.0) for j in new}
    scratch = torch.empty(CHUNK, dtype=torch.float64)
    for _, parts in iter_chunks([*vectors.values(), *([] if about is None else [about])]):
        r = None if about is None else parts[-1].double()
        rows = {
            member: part.double() if r is None or member == own else part.double() - r
            for member, part in zip(members, parts, strict=False)
        }
        for j, row in inner_products.items():
            for k in row:
                row[k] += float(torch.mul(rows[j], rows[k], out=scratch[: len(rows[j])]).sum())
    return inner_products


def gram(node_products: Products, members: Sequence[int], own: int | None) -> Tensor:
    """Return the Gram matrix G [n + 1, n + 1] of ``members`` in order, as
    :func:`~planaria.exchange.robust.products.products` defines it.

    :param node_products: products of one node about zero, a last value, or the vector of the member ``own``.
    :raises KeyError: if a product is missing.
    """
    count = len(members)
    matrix = torch.zeros(count + 1, count + 1, dtype=torch.float64)
    for index, j in enumerate(members):
        for column, k in enumerate(members[: index + 1]):
            product = node_products[j][k] if k in node_products[j] else node_products[k][j]
            matrix[index, column] = matrix[column, index] = product
    if own is not None:  # row and column hold r; the member's own difference from r is zero
        index = members.index(own)
        about = matrix[index].clone()
        matrix[index] = matrix[:, index] = 0.0
        matrix[count, count], about[index] = about[index].clone(), 0.0
        matrix[count, :count] = matrix[:count, count] = about[:count]
    return matrix
