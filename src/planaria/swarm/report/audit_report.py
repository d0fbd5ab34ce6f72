"""The result of ``planaria swarm audit``: a table on the terminal, and a page that starts with its limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.phrases import format_count, join_names
from planaria.report.tables import Table, show
from planaria.report.theme import BLUE, ORANGE, figure
from planaria.report.verdict import Verdict
from planaria.swarm.audit.audit_results import FAILED, NONE, PASSED, UNASKED, Audit, Leakage, LeakPoint

NOT_CLAIMED = (
    "This audit does not claim that the model is safe. Its results hold for the listed attacks and questions, the "
    "named adversary and its prior; not for free conversation, several accounts, or an adversary with more knowledge. "
    "Released weights can be queried without a wrapper: the wrapper protects a service, the audit informs a release."
)
BEHIND = (
    "Behind `planaria serve --censor` a reply to a listed question or part is empty with a fixed probability, such "
    "that k counted replies leak at most k · ε in expectation, for any asker and any order, if the prior is at least "
    "1 / options. The table shows the cost for honest users."
)


def show_audit(audit: Audit) -> None:
    """Print the gate, and each protected question."""
    show([_gate(audit), *([_questions(audit.leakage)] if audit.leakage else [])])
    print(_verdict(audit).summary)
    print(NOT_CLAIMED)


def write_audit_report(audit: Audit, file: Path) -> Path:
    """Write the page atomically; return its path. UserError if it cannot be written."""
    return page.write(file, page.document(f"{Path(audit.model).name} audited · planaria", body(audit)))


def body(audit: Audit) -> Iterator[str]:
    """The page's sections."""
    yield page.heading(audit.model, _verdict(audit), f"weights {audit.weights or 'unread'}")
    yield page.cards((part.name, part.verdict, part.summary) for part in audit.parts)
    yield page.section("The gate", NOT_CLAIMED, _gate(audit).html("gate"), *_facts(audit))
    if audit.leakage is not None:
        yield from _leakage(audit.leakage)
    yield page.footer("planaria swarm audit")


def _verdict(audit: Audit) -> Verdict:
    failed = audit.failed
    verdicts = ((FAILED, "Not passed"), (PASSED, "Passed"), (UNASKED, "Not asked"), (NONE, "Nothing there"))
    by = [(title, [part.name for part in audit.parts if part.verdict == verdict]) for verdict, title in verdicts]
    summary = " ".join(f"{title}: {join_names(names, 5)}." for title, names in by if names)
    numbers = [(f"{len(failed)} of {len(audit.parts)}", "parts that did not pass")]
    if audit.leakage is not None:
        worst = audit.leakage.questions[0]
        numbers.append((f"{worst.leak.mean:.3f} nats", f"leaked of {worst.name}, limit {audit.limits.leak:g}"))
    elif audit.attacks:
        kind, tally = max(audit.attacks.items(), key=lambda one: one[1].rate or 0.0)
        numbers.append((f"{tally.rate or 0.0:.1%}", f"success of {kind}, limit {audit.limits.success:.1%}"))
    return Verdict(not failed, "not passed" if failed else "passed", summary, numbers, NOT_CLAIMED)


def _gate(audit: Audit) -> Table:
    signs = {FAILED: "✗ failed"}
    rows = [[part.name, signs.get(part.verdict, part.verdict), part.summary] for part in audit.parts]
    return Table(f"{audit.model}: audit", ["part", "", "why"], rows, numbers_from=3)


def _facts(audit: Audit) -> Iterator[str]:
    for part in audit.parts:
        if len(part.facts) > 1:
            yield page.subheading(part.name)
            yield from map(page.paragraph, part.facts)


def _leakage(leakage: Leakage) -> Iterator[str]:
    method = (
        f"Read by {leakage.adversary}; each of {format_count(leakage.k, 'part')} was a separate prompt, with "
        f"{format_count(leakage.draws, 'reply', 'replies')} each. Nats: P · ln(P / prior) of the right answer, for "
        "these questions, this adversary and this prior."
    )
    yield page.section("Leakage of parts", method, _questions(leakage).html("questions"), _rivals(leakage).html("ways"))
    yield page.section(
        "By the number of parts",
        "The largest leakage of a question, and how often the adversary's most likely answer is right.",
        page.chart(_curve(leakage), "parts"),
    )
    if leakage.behind is not None:
        yield page.section("Behind the wrapper", BEHIND, _behind(leakage).html("wrapper"))
    if rows := [[question.name, ask, reply] for question in leakage.questions for ask, reply in question.replies]:
        transcript = page.table("transcript", ["question", "part", "reply"], rows, 3)
        yield page.section("Transcript", "The first draw of each part.", transcript)


def _questions(leakage: Leakage) -> Table:
    rows = [
        [question.name, f"{question.prior:.3f}", f"{question.posterior:.3f}", str(question.leak),
         f"{question.guessed:.2f}", f"{question.direct.leak:.3f}",
         f"{question.direct.guessed:.2f}", f"{question.use:.2f}"]
        for question in leakage.questions
    ]  # fmt: skip
    head = ["question", "prior", "posterior", "IIL, nats", "guessed", "IIL, direct", "guessed, direct", "utility"]
    return Table(f"leakage: {leakage.adversary}, {format_count(leakage.k, 'part')}, largest first", head, rows)


def _rivals(leakage: Leakage) -> Table:
    routes = [("directly, once", leakage.direct), (f"in {format_count(leakage.k, 'part')}", leakage.curve[-1])]
    if leakage.paraphrased is not None:
        routes.insert(1, ("directly, paraphrased", leakage.paraphrased))
    return Table(
        "strategies of asking", ["strategy", "largest IIL", "guessed"], [_row(name, point) for name, point in routes]
    )


def _behind(leakage: Leakage) -> Table:
    assert leakage.behind is not None and leakage.epsilon is not None
    plain, behind = leakage.curve[-1], leakage.behind
    rows = [
        [*_row("without wrapper", plain), f"{leakage.use:.2f}", "–", "–"],
        [
            *_row(f"behind the wrapper, ε = {leakage.epsilon:g}", behind), f"{behind.use:.2f}", f"{behind.silent:.2f}",
            f"{leakage.k * leakage.epsilon:g}",
        ],
    ]  # fmt: skip
    head = ["", "largest IIL", "guessed", "utility", "empty", "proved bound, k · ε"]
    return Table("utility and leakage", head, rows)


def _row(name: str, point: LeakPoint) -> list[str]:
    return [name, f"{point.leak:.3f}", f"{point.guessed:.2f}"]


def _curve(leakage: Leakage) -> go.Figure:
    fig = figure(360, x="parts", y="nats", hovermode="x unified")
    parts = list(range(1, leakage.k + 1))
    mode = "lines+markers"
    fig.add_scatter(x=parts, y=[p.leak for p in leakage.curve], mode=mode, name="largest IIL", line={"color": BLUE})
    guessed = [point.guessed for point in leakage.curve]
    fig.add_scatter(x=parts, y=guessed, mode=mode, name="guessed", line={"color": ORANGE, "dash": "dot"}, yaxis="y2")
    fig.update_layout(yaxis2={"overlaying": "y", "side": "right", "range": [0, 1], "showgrid": False})
    fig.update_xaxes(tickvals=parts)
    return fig
