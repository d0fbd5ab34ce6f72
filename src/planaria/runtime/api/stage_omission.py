"""Perplexity of a trained model without subsets of its block stages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from statistics import fmean

import torch

from planaria.common.documents import Record
from planaria.data.stream import BatchReader
from planaria.models.family import Pipelined
from planaria.runtime.worker.step_samples import Masks, TargetCounts


class Omission(Record):
    """Perplexities over subsets of one size."""

    share: float
    """requested share of the block stages"""
    stages: int
    """omitted stages"""
    subsets: int
    """measured subsets"""
    possible: int
    """existing subsets"""
    perplexity: float
    """geometric mean over the subsets"""
    min_perplexity: float
    max_perplexity: float
    over_full: float
    """perplexity relative to the whole model"""


def omissions(
    model: Pipelined,
    batch: BatchReader,
    microbatches: int,
    shares: Sequence[float],
    max_subsets: int,
    seed: int,
    masks: Masks | None = None,
    learned: TargetCounts | None = None,
    on_loss: Callable[[], object] = lambda: None,
) -> list[Omission]:
    """Evaluate the whole model, and the model without each share of its block stages.

    Each share is a mean over at most ``max_subsets`` subsets.

    :param batch: the text; ``microbatches`` of it are used
    :param masks: document masks, if any
    :param learned: the numbers of targets, if they differ
    :param seed: draws the subsets; the ends are never omitted
    :param on_loss: called after each of :func:`evaluations`
    """

    def measured(subset: Collection[int]) -> float:
        mean_loss = loss(model, batch, microbatches, subset, masks, learned)
        on_loss()
        return mean_loss

    stages = len(model.stages)
    full = measured(())
    summaries = [_summary(0.0, 0, 1, [full], full)]
    for share in shares:
        count = round(share * stages)
        subsets, possible = _subsets(stages, count, max_subsets, random.Random(f"{seed} {count}"))
        losses = [measured(subset) for subset in subsets]
        summaries.append(_summary(share, count, possible, losses, full))
    return summaries


def evaluations(stages: int, shares: Sequence[float], max_subsets: int) -> int:
    """Return the number of losses that :func:`omissions` measures."""
    return 1 + sum(min(max_subsets, math.comb(stages, round(share * stages))) for share in shares)


@torch.no_grad()
def loss(
    model: Pipelined,
    batch: BatchReader,
    microbatches: int,
    omitted: Collection[int],
    masks: Masks | None = None,
    learned: TargetCounts | None = None,
) -> float:
    """Return the mean cross entropy (nats) without the ``omitted`` block stages (1..S)."""
    total = 0.0
    for i in range(microbatches):
        tokens, targets = batch(i)
        mask = () if masks is None else (masks(i),)
        x = model.ends.embed(tokens, *mask)
        for number, stage in enumerate(model.stages, start=1):
            if number not in omitted:
                x = stage(x, *mask)
        total += model.ends.loss(x, targets).item() * (1.0 if learned is None else learned.weight(i))
    return total / microbatches


def _subsets(stages: int, count: int, max_subsets: int, rng: random.Random) -> tuple[list[tuple[int, ...]], int]:
    """Return all subsets of ``count`` stages, or ``max_subsets`` drawn ones; and how many exist."""
    possible = math.comb(stages, count)
    if possible <= max_subsets:
        return list(combinations(range(1, stages + 1), count)), possible
    drawn: set[tuple[int, ...]] = set()
    while len(drawn) < max_subsets:
        drawn.add(tuple(sorted(rng.sample(range(1, stages + 1), count))))
    return sorted(drawn), possible


def _summary(share: float, count: int, possible: int, losses: Sequence[float], full: float) -> Omission:
    mean = fmean(losses)
    return Omission(
        share=share,
        stages=count,
        subsets=len(losses),
        possible=possible,
        perplexity=math.exp(mean),
        min_perplexity=math.exp(min(losses)),
        max_perplexity=math.exp(max(losses)),
        over_full=math.exp(mean - full),
    )
