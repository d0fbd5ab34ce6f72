"""Verdict on an experts run: experts against one model of equal compute, and uneven against even experts."""

from __future__ import annotations

from planaria.lab.experts.budget import SYNCHRONISED
from planaria.lab.experts.experts_results import TIE, Results
from planaria.lab.trials.spread import Spread
from planaria.report.phrases import counted, listed
from planaria.report.verdict import Verdict


def verdict(found: Results) -> Verdict:
    """Return the verdict: good if the best ensemble beats its rival by more than ``TIE`` with every seed.

    The rival is the best generalist; without one, the best uneven arm is compared with equal experts. Bad if the rival
    wins the same way; otherwise undecided. Means are geometric, over all domains.
    """
    if not found.generalists and len(found.ensembles) == 1:
        only = f"Only equal experts ({SYNCHRONISED}) were scored with every seed."
        return Verdict(None, "nothing to compare", only, [], _lost(found, "", SYNCHRONISED))
    if not found.generalists:
        return _against_even(found)
    rival = min(found.generalists, key=lambda arm: Spread.of(found.overall(arm)).mean)
    best = min(found.ensembles, key=lambda arm: Spread.of(found.overall(arm, rival)).mean)
    mine, times = Spread.of(found.overall(best, rival)), found.times(best, rival)
    good, how, badge = _judged(mine, best, f"{rival} was better", f"as good as {rival}")
    text = (
        f"{best} {how} one model of the same training compute ({rival}): × {mine.mean:.3f} its perplexity"
        f"{_between(found, mine)}, at × {times:.1f} its compute a token. {_uneven(found)}"
    )
    domains = counted(len(found.domains), "domain")
    numbers = [
        (f"× {mine.mean:.3f}", f"perplexity of {best} over that of {rival}, mean over {domains}"),
        (f"× {times:.1f}", f"compute that a token takes to read with {best}, over {rival}"),
    ]
    return Verdict(good, badge, text.strip(), numbers, _lost(found, best, rival))


def _against_even(found: Results) -> Verdict:
    overall = {arm: Spread.of(found.overall(arm)) for arm in found.ensembles if arm != SYNCHRONISED}
    best = min(overall, key=lambda arm: overall[arm].mean)
    mine = overall[best]
    good, _, badge = _judged(mine, best, "equal experts were better", "as good as equal experts")
    wins, losses = (sum(found.verdict(best, d) == kind for d in found.domains) for kind in ("win", "loss"))
    domains = counted(len(found.domains), "domain")
    numbers = [
        (f"× {mine.mean:.3f}", f"perplexity of {best} over equal experts', mean over {domains}"),
        (f"{wins} : {losses}", f"domains won and lost by more than {TIE:.1%} with every seed"),
    ]
    return Verdict(good, badge, _uneven(found), numbers, _lost(found, best, SYNCHRONISED))


def _uneven(found: Results) -> str:
    """Compare the best uneven arm with equal experts in a sentence or two; empty if there is none."""
    overall = {arm: Spread.of(found.overall(arm)) for arm in found.ensembles if arm != SYNCHRONISED}
    if not overall:
        return ""
    best = min(overall, key=lambda arm: overall[arm].mean)
    mine = overall[best]
    _, how, _ = _judged(mine, best, "", "")
    text = f"{best} {how} equal experts of the same compute: × {mine.mean:.3f} their perplexity{_between(found, mine)}."
    others = [f"{arm} × {spread.mean:.3f}" for arm, spread in overall.items() if arm != best]
    return text + (f" The other uneven {'arm' if len(others) == 1 else 'arms'}: {listed(others)}." if others else "")


def _judged(mine: Spread, best: str, worse: str, alike: str) -> tuple[bool | None, str, str]:
    """Judge a ratio over seeds: whether it is good, a verb, and a short phrase."""
    if mine.most < 1 - TIE:
        return True, "beat", f"{best} was better"
    if mine.least > 1 + TIE:
        return False, "did not beat", worse
    return None, "came as far as", alike


def _between(found: Results, mine: Spread) -> str:
    if len(found.seeds) == 1:
        return " (one seed)"
    return f" ({mine.least:.3f} to {mine.most:.3f} over {counted(len(found.seeds), 'seed')})"


def _lost(found: Results, best: str, rival: str) -> str:
    """Describe experts that could not be trained, and domains on which the best arm is worse."""
    experts = sorted({name for run in found.runs for name in run.lost})
    parts = [f"{counted(len(experts), 'expert')} could not be trained ({listed(experts)})"] if experts else []
    worse = [domain for domain in found.domains if best and found.verdict(best, domain, rival) == "loss"]
    parts += [f"{best} is worse than {rival} on {listed(worse)}"] if worse else []
    return (
        f"Lost: {'; '.join(parts)}." if parts else "Nothing was lost: all experts were trained, and no domain is worse."
    )
