"""An experts run in words and two numbers: did the better of the uneven arms beat equal experts, and where not."""

from __future__ import annotations

from planaria.experts.budget import SYNCHRONISED
from planaria.experts.experts_results import TIE, Results
from planaria.observe.verdict import Verdict
from planaria.observe.words import counted, listed
from planaria.trials.spread import Spread


def verdict(found: Results) -> Verdict:
    """Good: the best uneven arm is better than equal experts by more than ``TIE`` with every seed; bad: none is near.

    Between these, the numbers do not tell. The mean is geometric, over all domains.
    """
    overall = {arm: Spread.of(found.overall(arm)) for arm in found.arms if arm != SYNCHRONISED and _full(found, arm)}
    if not overall:
        return Verdict(
            None,
            "nothing to compare",
            f"Only equal experts ({SYNCHRONISED}) were scored with every seed.",
            [],
            _lost(found, ""),
        )
    best = min(overall, key=lambda arm: overall[arm].mean)
    mine = overall[best]
    if mine.most < 1 - TIE:
        good, how, badge = True, "beat", f"{best} beat equal experts"
    elif mine.least > 1 + TIE:
        good, how, badge = False, "did not beat", "equal experts were better"
    else:
        good, how, badge = None, "came as far as", "as good as equal experts"
    seeds = counted(len(found.runs), "seed")
    between = f" ({mine.least:.3f} to {mine.most:.3f} over {seeds})" if len(found.runs) > 1 else " (one seed)"
    said = f"{best} {how} equal experts of the same compute: × {mine.mean:.3f} their perplexity{between}."
    others = [f"{arm} × {spread.mean:.3f}" for arm, spread in overall.items() if arm != best]
    said += f" The other uneven {'arm' if len(others) == 1 else 'arms'}: {listed(others)}." if others else ""
    wins, losses = (sum(found.verdict(best, d) == kind for d in found.domains) for kind in ("win", "loss"))
    numbers = [
        (
            f"× {mine.mean:.3f}",
            f"perplexity of {best} over equal experts', mean over {counted(len(found.domains), 'domain')}",
        ),
        (f"{wins} : {losses}", f"domains won and lost by more than {TIE:.1%} with every seed"),
    ]
    return Verdict(good, badge, said, numbers, _lost(found, best))


def _full(found: Results, arm: str) -> bool:
    return all(arm in run.arms for run in found.runs)


def _lost(found: Results, best: str) -> str:
    """Experts that could not be trained, and domains on which the best arm is worse."""
    experts = sorted({name for run in found.runs for name in run.lost})
    parts = [f"{counted(len(experts), 'expert')} could not be trained ({listed(experts)})"] if experts else []
    worse = [domain for domain in found.domains if best and found.verdict(best, domain) == "loss"]
    parts += [f"{best} is worse on {listed(worse)}"] if worse else []
    return (
        f"Lost: {'; '.join(parts)}." if parts else "Nothing was lost: all experts were trained, and no domain is worse."
    )
