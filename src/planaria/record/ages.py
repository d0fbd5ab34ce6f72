"""How long each holder has kept its copies of others up to date: one rule for the record and the inline engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


def after_commit(
    ages: Mapping[int, int], rested: frozenset[int], skipped: Collection[int], copies: Iterable[tuple[int, int]]
) -> tuple[Mapping[int, int], frozenset[int]]:
    """The ages, and the nodes that have rested, once a step is committed.

    Parameters
    ----------
    ages: node → commits of its present, or last, holder, through which it kept its copies of others up to date.
    rested: nodes that were skipped since the last commit of all nodes: their copies have missed steps.
    skipped: nodes without which this step was made. Copies from and at them rest; nobody's count grows by it.
    copies: pairs of nodes, one of which keeps a copy of the other.
    """
    rested = rested | frozenset(skipped)
    if skipped:
        return ages, rested
    # A copy that has missed steps may have been half renewed before: its keeper begins to count anew.
    anew = {node for pair in copies if rested & set(pair) for node in pair}
    return {node: 1 if node in anew else age + 1 for node, age in ages.items()}, frozenset()
