"""Verdict on an experts run: experts against one model of equal compute, and uneven against even experts."""

from __future__ import annotations

from planaria.lab.experts.budget import SYNCHRONISED
from planaria.lab.experts.experts_results import TIE, Results
from planaria.report.phrases import format_count, join_names
from planaria.report.verdict import Verdict
from planaria.trials.spread import Spread


def verdict(results: Results) -> Verdict:
    """Return the verdict: good if the best ensemble beats its rival by more than ``TIE`` with every seed.

    The rival is the best generalist; without one, the best uneven arm is compared with equal experts. Bad if the rival
    wins the same way; otherwise undecided. Means are geometric, over all domains.
    """
    if not results.generalists and len(results.ensembles) == 1:
        only = f"Only equal experts ({SYNCHRONISED}) were scored with every seed."
        return Verdict(None, "nothing to compare", only, [], _cost_sentence(results, "", SYNCHRONISED))
    if not results.generalists:
        return _verdict_against_even(results)
    rival = min(results.generalists, key=lambda arm: Spread.of(results.overall(arm)).mean)
    best = min(results.ensembles, key=lambda arm: Spread.of(results.overall(arm, rival)).mean)
    own, times = Spread.of(results.overall(best, rival)), results.times(best, rival)
    good, relation, badge = _judge(own, best, f"{rival} was better", f"as good as {rival}")
    text = (
        f"{best} {relation} one model of the same training compute ({rival}): × {own.mean:.3f} its perplexity"
        f"{_seed_range(results, own)}, at × {times:.1f} its compute per token. {_uneven_sentence(results)}"
    )
    domains = format_count(len(results.domains), "domain")
    numbers = [
        (f"× {own.mean:.3f}", f"perplexity of {best} over that of {rival}, mean over {domains}"),
        (f"× {times:.1f}", f"compute per token of {best} over that of {rival}"),
    ]
    return Verdict(good, badge, text.strip(), numbers, _cost_sentence(results, best, rival))


def _verdict_against_even(results: Results) -> Verdict:
    best, own = next(iter(_uneven_arms(results).items()))
    good, _, badge = _judge(own, best, "equal experts were better", "as good as equal experts")
    wins, losses = (sum(results.verdict(best, d) == kind for d in results.domains) for kind in ("win", "loss"))
    domains = format_count(len(results.domains), "domain")
    numbers = [
        (f"× {own.mean:.3f}", f"perplexity of {best} over equal experts', mean over {domains}"),
        (f"{wins} : {losses}", f"domains won and lost by more than {TIE:.1%} with every seed"),
    ]
    return Verdict(good, badge, _uneven_sentence(results), numbers, _cost_sentence(results, best, SYNCHRONISED))


def _uneven_sentence(results: Results) -> str:
    """Compare the best uneven arm with equal experts in a sentence or two; empty if there is none."""
    overall = _uneven_arms(results)
    if not overall:
        return ""
    (best, own), *others = overall.items()
    _, relation, _ = _judge(own, best, "", "")
    ratio = f"× {own.mean:.3f} their perplexity{_seed_range(results, own)}"
    text = f"{best} {relation} equal experts of the same compute: {ratio}."
    named = join_names([f"{arm} × {spread.mean:.3f}" for arm, spread in others])
    return text + (f" The other uneven {'arm' if len(others) == 1 else 'arms'}: {named}." if others else "")


def _uneven_arms(results: Results) -> dict[str, Spread]:
    """Return the other ensembles' perplexity over that of equal experts, the best first."""
    overall = {arm: Spread.of(results.overall(arm)) for arm in results.ensembles if arm != SYNCHRONISED}
    return dict(sorted(overall.items(), key=lambda arm: arm[1].mean))


def _judge(own: Spread, best: str, worse: str, equal: str) -> tuple[bool | None, str, str]:
    """Judge a ratio over seeds: whether it is good, a verb, and a short phrase."""
    if own.most < 1 - TIE:
        return True, "beat", f"{best} was better"
    if own.least > 1 + TIE:
        return False, "did not beat", worse
    return None, "matched", equal


def _seed_range(results: Results, own: Spread) -> str:
    if len(results.seeds) == 1:
        return " (one seed)"
    return f" ({own.least:.3f} to {own.most:.3f} over {format_count(len(results.seeds), 'seed')})"


def _cost_sentence(results: Results, best: str, rival: str) -> str:
    """Describe experts that could not be trained, and domains on which the best arm is worse."""
    experts = sorted({name for run in results.runs for name in run.lost})
    lost = [f"{format_count(len(experts), 'expert')} could not be trained ({join_names(experts)})"] if experts else []
    worse = [domain for domain in results.domains if best and results.verdict(best, domain, rival) == "loss"]
    lost += [f"{best} is worse than {rival} on {join_names(worse)}"] if worse else []
    return (
        f"Lost: {'; '.join(lost)}." if lost else "Nothing was lost: all experts were trained, and no domain is worse."
    )
