"""A bound by design on what one peer can do to the others in one round, whatever it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence


def scales(weights: Sequence[tuple[str, float]], share: float) -> Mapping[str, float]:
    """peer → the factor on its advantages that leaves no peer more than ``share`` of the round's Σ|Â|.

    ``weights``: (peer, |Â|) of every completion that is learned from. The update is a sum in which each completion
    weighs |Â|, so a peer's part of that sum is the most it can turn the update by. With n peers the bound is at least
    1/n, else nobody could learn.
    """
    mass: dict[str, float] = defaultdict(float)
    for peer, weight in weights:
        mass[peer] += weight
    mass = {peer: value for peer, value in mass.items() if value > 0}
    bound = max(share, 1 / max(1, len(mass)))
    factors = dict.fromkeys(mass, 1.0)
    over: set[str] = set()
    # Scaling one peer down raises the others' parts, so whoever comes to lie above the bound is scaled with it.
    while len(over) * bound < 1 - 1e-9:
        rest = sum(value for peer, value in mass.items() if peer not in over)
        level = rest * bound / (1 - len(over) * bound)
        found = {peer for peer, value in mass.items() if peer not in over and value > level * (1 + 1e-9)}
        if not found:
            break
        over |= found
    if over:  # whoever has least lies below 1/n of the rest: it is never among them
        rest = sum(value for peer, value in mass.items() if peer not in over)
        level = rest * bound / (1 - len(over) * bound)
        factors |= {peer: level / mass[peer] for peer in over}
    return factors
