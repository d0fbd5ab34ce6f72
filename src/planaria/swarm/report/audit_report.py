"""The result of ``planaria swarm audit``: a table on the terminal, and a page that starts with its limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.phrases import counted, listed
from planaria.report.tables import Table, show
from planaria.report.theme import BLUE, ORANGE, figure
from planaria.report.verdict import Verdict
from planaria.swarm.audit.results import FAILED, NONE, PASSED, UNASKED, Audit, GivenAway, Leakage

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


def show_audit(found: Audit) -> None:
    """Print the gate, and each protected question."""
    show([_gate(found), *([_questions(found.leakage)] if found.leakage else [])])
    print(_verdict(found).summary)
    print(NOT_CLAIMED)


def write_audit_report(found: Audit, file: Path) -> Path:
    """Write the page atomically; return its path. UserError if it cannot be written."""
    return page.write(file, page.document(f"{Path(found.model).name} audited · planaria", body(found)))


def body(found: Audit) -> Iterator[str]:
    """The page's sections."""
    yield page.heading(found.model, _verdict(found), f"weights {found.weights or 'unread'}")
    yield page.cards((part.name, part.verdict, part.said) for part in found.parts)
    yield page.section("The gate", NOT_CLAIMED, _gate(found).html("gate"), *_facts(found))
    if found.leakage is not None:
        yield from _leakage(found.leakage)
    yield page.footer("planaria swarm audit")


def _verdict(found: Audit) -> Verdict:
    failed = found.failed
    verdicts = ((FAILED, "Not passed"), (PASSED, "Passed"), (UNASKED, "Not asked"), (NONE, "Nothing there"))
    by = [(title, [part.name for part in found.parts if part.verdict == verdict]) for verdict, title in verdicts]
    said = " ".join(f"{title}: {listed(names, 5)}." for title, names in by if names)
    numbers = [(f"{len(failed)} of {len(found.parts)}", "parts that did not pass")]
    if found.leakage is not None:
        worst = found.leakage.questions[0]
        numbers.append((f"{worst.leak.mean:.3f} nats", f"leaked of {worst.name}, limit {found.limits.leak:g}"))
    elif found.attacks:
        kind, tally = max(found.attacks.items(), key=lambda one: one[1].rate or 0.0)
        numbers.append((f"{tally.rate or 0.0:.1%}", f"success of {kind}, limit {found.limits.success:.1%}"))
    return Verdict(not failed, "not passed" if failed else "passed", said, numbers, NOT_CLAIMED)


def _gate(found: Audit) -> Table:
    signs = {FAILED: "✗ failed"}
    rows = [[part.name, signs.get(part.verdict, part.verdict), part.said] for part in found.parts]
    return Table(f"{found.model}: audit", ["part", "", "why"], rows, numbers_from=3)


def _facts(found: Audit) -> Iterator[str]:
    for part in found.parts:
        if len(part.facts) > 1:
            yield page.subheading(part.name)
            yield from map(page.note, part.facts)


def _leakage(found: Leakage) -> Iterator[str]:
    method = (
        f"Read by {found.adversary}; each of {counted(found.k, 'part')} was a separate prompt, with "
        f"{counted(found.draws, 'reply', 'replies')} each. Nats: P · ln(P / prior) of the right answer, for these "
        "questions, this adversary and this prior."
    )
    yield page.section("Leakage of parts", method, _questions(found).html("questions"), _rivals(found).html("ways"))
    yield page.section(
        "By the number of parts",
        "The largest leakage of a question, and how often the adversary's likeliest answer is right.",
        page.chart(_curve(found), "parts"),
    )
    if found.behind is not None:
        yield page.section("Behind the wrapper", BEHIND, _behind(found).html("wrapper"))
    if rows := [[one.name, ask, reply] for one in found.questions for ask, reply in one.said]:
        transcript = page.table("transcript", ["question", "part", "reply"], rows, 3)
        yield page.section("Transcript", "The first draw of each part.", transcript)


def _questions(found: Leakage) -> Table:
    rows = [
        [one.name, f"{one.prior:.3f}", f"{one.posterior:.3f}", str(one.leak), f"{one.guessed:.2f}",
         f"{one.direct.leak:.3f}", f"{one.direct.guessed:.2f}", f"{one.use:.2f}"]
        for one in found.questions
    ]  # fmt: skip
    head = ["question", "prior", "posterior", "IIL, nats", "guessed", "IIL, direct", "guessed, direct", "utility"]
    return Table(f"leakage: {found.adversary}, {counted(found.k, 'part')}, largest first", head, rows)


def _rivals(found: Leakage) -> Table:
    """Return the same questions under other strategies of asking."""
    ways = [("directly, once", found.direct), (f"in {counted(found.k, 'part')}", found.curve[-1])]
    if found.paraphrased is not None:
        ways.insert(1, ("directly, paraphrased", found.paraphrased))
    return Table(
        "strategies of asking", ["strategy", "largest IIL", "guessed"], [_row(name, one) for name, one in ways]
    )


def _behind(found: Leakage) -> Table:
    assert found.behind is not None and found.epsilon is not None
    plain, behind = found.curve[-1], found.behind
    rows = [
        [*_row("without wrapper", plain), f"{found.use:.2f}", "–", "–"],
        [
            *_row(f"behind the wrapper, ε = {found.epsilon:g}", behind), f"{behind.use:.2f}", f"{behind.silent:.2f}",
            f"{found.k * found.epsilon:g}",
        ],
    ]  # fmt: skip
    head = ["", "largest IIL", "guessed", "utility", "empty", "proved bound, k · ε"]
    return Table("utility and leakage", head, rows)


def _row(name: str, point: GivenAway) -> list[str]:
    return [name, f"{point.leak:.3f}", f"{point.guessed:.2f}"]


def _curve(found: Leakage) -> go.Figure:
    fig = figure(360, x="parts", y="nats", hovermode="x unified")
    parts = list(range(1, found.k + 1))
    mode = "lines+markers"
    fig.add_scatter(x=parts, y=[p.leak for p in found.curve], mode=mode, name="largest IIL", line={"color": BLUE})
    guessed = [point.guessed for point in found.curve]
    fig.add_scatter(x=parts, y=guessed, mode=mode, name="guessed", line={"color": ORANGE, "dash": "dot"}, yaxis="y2")
    fig.update_layout(yaxis2={"overlaying": "y", "side": "right", "range": [0, 1], "showgrid": False})
    fig.update_xaxes(tickvals=parts)
    return fig
