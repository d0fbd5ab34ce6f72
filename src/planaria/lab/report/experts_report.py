"""The report of an experts run: tables on the terminal, and one HTML page that works offline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from planaria.lab.experts.budget import SYNCHRONISED
from planaria.lab.experts.experts_results import TIE, Results, TextWeights, geometric_mean
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.report.experts_verdict import verdict
from planaria.lab.report.worst_report import section as worst_section
from planaria.report import page
from planaria.report.phrases import format_count
from planaria.report.spread_figures import error_bars
from planaria.report.tables import Table, show
from planaria.report.theme import CARRIED, MUTED, SERIES, add_heatmap, escape_label, figure, integer_x_axis, stroke
from planaria.trials.spread import Spread, format_seeds, format_spread, spread


def show_results(results: Results) -> None:
    """Print perplexities, wins and costs."""
    show(_tables(results).values())


def write_experts_report(results: Results, file: Path) -> Path:
    """Write the report to ``file`` atomically, and return its path; raise UserError if it is not writable."""
    return page.write(file, page.document(f"{results.name}: experts · planaria", body(results)))


def _tables(results: Results) -> dict[str, Table]:
    return {
        name: table for name, table in (_score_tables(results) | _explanation_tables(results)).items() if table.rows
    }


def _score_tables(results: Results) -> dict[str, Table]:
    """Return tables of the arms' quality, routing and cost."""
    others = [arm for arm in results.arms if arm != SYNCHRONISED]
    return {
        "perplexities": Table(
            f"{results.name}: test perplexity, mean [least … most] of {format_seeds(results.seeds)}",
            ["domain", *results.arms],
            [_perplexity_row(results, domain) for domain in results.domains],
        ),
        "ratios": Table(
            f"the same over {SYNCHRONISED}'s; below 1 is better",
            ["domain", *others],
            [
                *(_ratio_row(results, domain, others) for domain in results.domains),
                ["geometric mean, with experts", *(_cell(results.overall(a, domains=results.trained)) for a in others)],
                ["geometric mean, all", *(_cell(results.overall(arm)) for arm in others)],
            ],
        ),
        "routing": _routing_table(results),
        "wins": Table(
            f"against {SYNCHRONISED}: won or lost by more than {TIE:.1%} with every seed; else ties",
            ["arm", "wins", "ties", "losses"],
            [[arm, *(str(_count_verdicts(results, arm, v)) for v in ("win", "tie", "loss"))] for arm in others],
        ),
        "generalist": Table(
            "one model with the compute of all experts: ensembles' perplexity over its; below 1, experts are better",
            ["ensemble", "over", "with experts", "all domains", "won / tied / lost", "compute a token"],
            [_rival_row(results, arm, rival) for rival in results.generalists for arm in results.ensembles],
            numbers_from=2,
        ),
        "compute": Table(
            "FLOPs: of training an arm's experts (one seed), and of the experts active in its mixture for one token",
            ["arm", "FLOPs", f"/ {SYNCHRONISED}", "parameters × tokens", "without embeddings", "a token", "models"],
            [_cost_row(results, arm) for arm in results.arms],
        ),
    }


def _routing_table(results: Results) -> Table:
    """Return the share of test texts that each arm routes to the expert of their domain; empty without a mixture."""
    mixture = results.mixture or MixtureSpec()
    at = f"after {format_count(mixture.prefix + 1, 'token')}" if mixture.top_k == 1 else "at its end"
    rows = [_routing_row(results, arm, arm) for arm in results.ensembles]
    alone = _routing_row(results, "prior alone, whole text", SYNCHRONISED, by_prior=True)
    return Table(
        f"mixture ({mixture.describe()}): share of test texts whose own domain's expert has the largest weight, {at}",
        ["arm", *results.active_domains, "mean"],
        [row for row in (*rows, alone) if row[-1] != "–"] if results.mixture else [],
    )


def _routing_row(results: Results, label: str, arm: str, by_prior: bool = False) -> list[str]:
    columns = [*([domain] for domain in results.active_domains), results.active_domains]
    shares = [results.routed(arm, domains, by_prior) for domains in columns]
    return [label, *(_cell(own) if own else "–" for own in shares)]


def _explanation_tables(results: Results) -> dict[str, Table]:
    """Return tables that explain the results."""
    others = [arm for arm in results.arms if arm != SYNCHRONISED]
    return {
        "luck": Table(
            "effect of the parent: geometric mean over all domains, for each of several parents of a size",
            ["", "mean of a seed's parents [least … most seed]", "each parent over that mean"],
            [
                *(
                    [f"{arm} over {SYNCHRONISED}", _cell(results.overall(arm)), _format_parent_range(results.luck(arm))]
                    for arm in others
                ),
                *(_parent_row(results, size) for size in results.runs[0].parents),
            ],
        ),
        "difficulty": Table(
            "difficulty of the domains (nats; mean over seeds) and their tiers, 0 is easiest",
            ["domain", *(cell for by in results.runs[0].difficulty for cell in (by, f"{by}: tiers"))],
            [_difficulty_row(results, domain) for domain in results.trained],
        ),
        "one-lost": Table(
            "one expert lost: perplexity of the mixture over that before the loss (geometric mean over seeds)",
            ["lost", *results.domains],
            [_lost_row(results, domain) for domain in results.active_domains],
        ),
        "fewer": Table(
            "fewer experts after the prefix: perplexity over that with all experts active, geometric mean over domains",
            ["arm", *(f"{k} ({passes:.2f} passes a token)" for k, passes in _passes_by_k(results).items())],
            [
                [arm, *(_cell(_fewer_experts_ratios(results, arm, k)) for k in _passes_by_k(results))]
                for arm in results.ensembles
            ],
        ),
    }


def _speech_section(speech: TextWeights) -> str:
    return page.section(
        "Expert weights over text",
        "Pieces of the domains' test texts, joined. Each token is coloured by the experts' weights, which "
        "depend on the text before it. The weights need a few tokens to adapt to a new domain.",
        page.legend(zip(speech.experts, SERIES, strict=False)),
        page.tinted_text(
            (text, mix_colours(weights)) for text, weights in zip(speech.pieces, speech.weights, strict=True)
        ),
    )


def _domain_label(results: Results, domain: str) -> str:
    return domain if domain in results.trained else f"{domain} (never trained)"


def _perplexity_row(results: Results, domain: str) -> list[str]:
    return [_domain_label(results, domain), *(_cell(results.perplexities(arm, domain), ".2f") for arm in results.arms)]


def _ratio_row(results: Results, domain: str, uneven: Sequence[str]) -> list[str]:
    cells = (f"{_cell(results.ratios(arm, domain))} {results.verdict(arm, domain)}" for arm in uneven)
    return [_domain_label(results, domain), *cells]


def _cell(numbers: Sequence[float], form: str = ".3f") -> str:
    return format_spread(spread(numbers), form)


def _count_verdicts(results: Results, arm: str, kind: str, to: str = SYNCHRONISED) -> int:
    return sum(results.verdict(arm, domain, to) == kind for domain in results.domains)


def _cost_row(results: Results, arm: str) -> list[str]:
    own, even = results.runs[0].arms[arm], results.runs[0].arms[SYNCHRONISED]
    spent = [f"{number:.4g}" for number in (own.parameter_tokens, own.inner_parameter_tokens, own.token_flops)]
    return [arm, f"{own.flops:.4g}", f"{own.flops / even.flops:.4f}", *spent, str(len(own.experts))]


def _rival_row(results: Results, arm: str, rival: str) -> list[str]:
    counts = " / ".join(str(_count_verdicts(results, arm, kind, rival)) for kind in ("win", "tie", "loss"))
    ratios = (results.overall(arm, rival, results.trained), results.overall(arm, rival))
    return [arm, rival, *map(_cell, ratios), counts, f"× {results.times(arm, rival):.2f}"]


def _format_parent_range(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.3f} … {max(numbers):.3f}" if len(set(numbers)) > 1 else "one parent"


def _parent_row(results: Results, size: str) -> list[str]:
    """Compare the parents of a size with each other."""
    seeds = results.branched(size)
    relative = [perplexity / geometric_mean(lines) for lines in seeds for perplexity in lines]
    return [
        f"parents of size {size}: perplexity",
        _cell([geometric_mean(lines) for lines in seeds], ".2f"),
        _format_parent_range(relative),
    ]


def _difficulty_row(results: Results, domain: str) -> list[str]:
    cells = [domain]
    for by in results.runs[0].difficulty:
        firsts = [results.of(seed)[0] for seed in results.seeds]
        cells.append(_cell([run.difficulty[by][domain] for run in firsts]))
        cells.append(" ".join(str(run.tier[by][domain]) for run in firsts))
    return cells


def _lost_row(results: Results, lost: str) -> list[str]:
    """Describe the even arm without the expert of a domain, over the seeds with that expert and others."""
    arms = [run.arms[SYNCHRONISED] for run in results.runs]
    pairs = [(arm, arm.without[job.name]) for arm in arms for job in arm.experts if job.domain == lost and arm.without]
    ratios = [[math.exp(left[d] - arm.scores[d].loss) for arm, left in pairs] for d in results.domains]
    return [lost, *(f"{geometric_mean(ratios_here):.3f}" if ratios_here else "–" for ratios_here in ratios)]


def _passes_by_k(results: Results) -> Mapping[str, float]:
    """Return top-k → forward passes per token of the fullest arm; others may have lost experts."""
    return max((arm.passes for run in results.runs for arm in run.arms.values()), key=len)


def _fewer_experts_ratios(results: Results, arm: str, k: str) -> list[float]:
    seeds = [[run.arms[arm] for run in results.of(seed) if k in run.arms[arm].fewer] for seed in results.seeds]
    return [
        math.exp(fmean(r.fewer[k][d].loss - r.all_experts[d].loss for d in results.domains for r in runs))
        for runs in seeds
        if runs
    ]


def body(results: Results) -> Iterator[str]:
    """Yield the report's sections as HTML."""
    summary = (
        f"{format_count(len(results.trained), 'domain')} with an expert each, {len(results.untrained)} without "
        f"training, {format_count(len(results.seeds), 'seed')}. Arms distribute equal compute differently: equally "
        "(M_Ho-I_Ho), longer training for harder domains (M_Ho-I_He), larger models for harder domains (M_He-I_Ho), "
        "one model for all domains (generalist)."
    )
    yield page.heading(results.name, verdict(results), summary)
    tables = _tables(results)
    perplexity, ratios = tables.pop("perplexities"), tables.pop("ratios")
    yield page.section(
        "Perplexity of each arm, over that of equal experts",
        "Test text: whole documents that no training, probe or prior has read. Below 1, the other arm is better. Mean "
        "and range over seeds; all arms of a seed share parents and test text, and experts their data order.",
        page.chart(perplexity_figure(results), "perplexity"),
        ratios.html("ratios"),
    )
    yield page.section("Test perplexity", "Mean [least … most] over seeds.", perplexity.html("perplexities"))
    if results.runs[0].curves:
        yield page.section(
            "Difficulty of each domain",
            "Difficulty is the loss reduction in the last doubling of a probe's steps, not its first loss. First seed.",
            page.chart(probe_figure(results), "probe"),
        )
    yield page.section(
        "Expert weights by domain",
        f"Mean posterior weight of each expert of {SYNCHRONISED} on each domain's test text, first seed.",
        page.chart(speaking_figure(results), "speaking"),
    )
    if results.speech is not None:
        yield _speech_section(results.speech)
    if results.worst is not None:
        yield worst_section(results.worst)
    for name, table in tables.items():
        yield page.section(table.title[0].upper() + table.title[1:], "", table.html(name))
    yield page.footer("Written by planaria experts train; results.json next to this page has every number.")


def mix_colours(weights: Sequence[float]) -> str:
    """Return the experts' colours on white, mixed by weight, as a CSS colour."""
    mixed = [255.0] * 3
    for colour, weight in zip(cycle(SERIES), weights, strict=False):
        mixed = [have - 0.6 * weight * (255 - channel) for have, channel in zip(mixed, hex_to_rgb(colour), strict=True)]
    return f"rgb({', '.join(str(max(0, round(channel))) for channel in mixed)})"


def perplexity_figure(results: Results) -> go.Figure:
    """Plot each other arm's perplexity over the even arm's, by domain; whiskers from minimum to maximum seed."""
    fig, least, most = figure(380, x="domain", y=f"perplexity over {SYNCHRONISED}'s"), 1.0, 1.0
    uneven = [arm for arm in results.arms if arm != SYNCHRONISED]
    for index, arm in enumerate(uneven):
        ratios = [results.ratios(arm, domain) for domain in results.domains]
        least, most = min(least, *map(min, ratios)), max(most, *map(max, ratios))
        spreads = [Spread.of(of_seeds) for of_seeds in ratios]
        fig.add_scatter(
            x=[escape_label(domain) for domain in results.domains],
            y=[ratio_spread.mean for ratio_spread in spreads],
            mode="markers",
            name=escape_label(arm),
            marker=stroke(index)["marker"] | {"size": 10},
            error_y=error_bars(spreads),
        )
    fig.add_hline(y=1, line={"width": 1, "color": MUTED})
    fig.update_layout(scattermode="group")  # puts arms side by side; it would also start the axis at 0
    return fig.update_yaxes(range=[least - 0.02, most + 0.02])


def probe_figure(results: Results) -> go.Figure:
    """Plot held-out loss over the steps of the first seed's probes, one line per domain."""
    fig = figure(320, x="steps of the probe", y="held-out loss, nats per token")
    curves = results.runs[0].curves
    for index, (name, curve) in enumerate(curves.items()):
        steps, losses = zip(*curve, strict=True)
        fig.add_scatter(x=steps, y=losses, mode="lines+markers", name=escape_label(name), **stroke(index, len(curves)))
    return integer_x_axis(fig, [step for curve in curves.values() for step, _ in curve])


def speaking_figure(results: Results) -> go.Figure:
    """Plot the mean weight of each expert (columns) on each domain's test text (rows)."""
    arm = results.runs[0].arms[SYNCHRONISED]
    fig = figure(90 + 30 * len(results.domains), x="expert of", y="text of")
    experts = [escape_label(job.domain) for job in arm.experts]
    texts = [escape_label(domain) for domain in results.domains]
    weights = [arm.scores[domain].speaking for domain in results.domains]
    style: dict[str, Any] = {"colorbar": {"title": "weight", "thickness": 12, "outlinewidth": 0}, "zmax": 1}
    style |= {"xgap": 1, "ygap": 1, "texttemplate": "%{z:.2f}"}
    add_heatmap(fig, experts, texts, weights, CARRIED, "expert of %{x}, text of %{y}: %{z:.3f}", **style)
    fig.update_yaxes(autorange="reversed")
    return fig
