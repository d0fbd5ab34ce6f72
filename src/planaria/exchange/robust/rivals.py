"""What other rules would have counted of members that count little, from the same inner products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from planaria.exchange.robust.base import GramRule, Rule
from planaria.exchange.robust.combining import coefficients
from planaria.exchange.robust.mixing import Mix

_LITTLE = 0.5
"""of what a member counts in a mean"""


def suspects(counted: Sequence[float], liars: int) -> list[int]:
    """Places, in order, of those that count less than half of their share in a mean: of as many as may lie at most."""
    little = [place for place, value in enumerate(counted) if value < _LITTLE / len(counted)]
    return sorted(sorted(little, key=lambda place: (counted[place], place))[:liars])


def rivals(rules: Mapping[str, Rule], own: GramRule, gram: Tensor, mix: Mix, draw: int) -> dict[str, Tensor]:
    """c [n] by each of the ``rules`` in place of the run's ``own``, from G of a round with ``mix`` and ``draw``.

    Without those of which inner products tell nothing: that look at each coordinate by itself; that go on from a last
    value, if the run's does not, or by directions from the origin, if the run's does, as its G is about that value; for
    which members are too few; and its own.
    """
    found = {}
    for name, rule in rules.items():
        told = isinstance(rule, GramRule) and rule.continues <= own.continues and not (rule.origin and own.continues)
        if not told or type(rule) is type(own):
            continue
        assert isinstance(rule, GramRule)
        try:
            found[name] = coefficients(rule, gram, mix, draw, own.continues)
        except ValueError:  # too few
            continue
    return found
