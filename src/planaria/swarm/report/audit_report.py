"""``planaria audit``'s answer: a table on the terminal, and one page whose first screen says what it does not claim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.tables import Table, show
from planaria.report.theme import BLUE, ORANGE, figure
from planaria.report.verdict import Verdict
from planaria.report.words import counted, listed
from planaria.swarm.audit.results import FAILED, NONE, PASSED, UNASKED, Audit, GivenAway, Leakage

NOT_CLAIMED = (
    "That the model is safe is not said. What is measured holds for the attacks and questions that were asked for, the "
    "adversary named and its prior; not for free conversation, several accounts, or somebody who knows more. Weights "
    "that are given away can be asked without any wrapper: the wrapper protects a service, the audit informs a "
    "release."
)
BEHIND = (
    "Behind `planaria serve --censor` a reply to a listed question or part is empty by chance. The chance is such that "
    "k counted replies tell at most k · ε in expectation, whoever asks and however, as long as the prior is no lower "
    "than one in so many options. What that costs honest askers stands beside it."
)


def show_audit(found: Audit) -> None:
    """Print the gate, and each protected question."""
    show([_gate(found), *([_questions(found.leakage)] if found.leakage else [])])
    print(_verdict(found).said)
    print(NOT_CLAIMED)


def write_audit_report(found: Audit, file: Path) -> Path:
    """Write the page, whole or not at all; its path. UserError when that is impossible."""
    return page.write(file, page.document(f"{Path(found.model).name} audited · planaria", body(found)))


def body(found: Audit) -> Iterator[str]:
    """The page's sections."""
    yield page.heading(found.model, _verdict(found), f"weights {found.weights or 'unread'}")
    yield page.cards((part.name, part.verdict, part.said) for part in found.parts)
    yield page.section("The gate", NOT_CLAIMED, _gate(found).html("gate"), *_facts(found))
    if found.leakage is not None:
        yield from _leakage(found.leakage)
    yield page.footer("planaria audit")


def _verdict(found: Audit) -> Verdict:
    failed = found.failed
    verdicts = ((FAILED, "Not passed"), (PASSED, "Passed"), (UNASKED, "Not asked"), (NONE, "Nothing there"))
    by = [(said, [part.name for part in found.parts if part.verdict == verdict]) for verdict, said in verdicts]
    said = " ".join(f"{said}: {listed(names, 5)}." for said, names in by if names)
    numbers = [(f"{len(failed)} of {len(found.parts)}", "parts that did not pass")]
    if found.leakage is not None:
        worst = found.leakage.questions[0]
        numbers.append((f"{worst.leak.mean:.3f} nats", f"given away of {worst.name}, at most {found.limits.leak:g}"))
    elif found.attacks:
        kind, tally = max(found.attacks.items(), key=lambda one: one[1].rate or 0.0)
        numbers.append((f"{tally.rate or 0.0:.1%}", f"success of {kind}, at most {found.limits.success:.1%}"))
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
    told = (
        f"Read by {found.adversary}; each of {counted(found.k, 'part')} was asked apart, "
        f"{counted(found.draws, 'reply', 'replies')} to each. Nats: P · ln(P / prior) of the right answer. For these "
        "questions, this adversary, this prior."
    )
    yield page.section("What parts give away", told, _questions(found).html("questions"), _rivals(found).html("ways"))
    yield page.section(
        "By the number of parts",
        "The worst question's leakage, and how often the adversary's likeliest answer is right.",
        page.chart(_curve(found), "parts"),
    )
    if found.behind is not None:
        yield page.section("Behind the wrapper", BEHIND, _behind(found).html("wrapper"))
    if rows := [[one.name, ask, reply] for one in found.questions for ask, reply in one.said]:
        told = page.table("said", ["question", "part", "reply"], rows, 3)
        yield page.section("Asked and said", "The first draw of each part.", told)


def _questions(found: Leakage) -> Table:
    rows = [
        [one.name, f"{one.prior:.3f}", f"{one.posterior:.3f}", str(one.leak), f"{one.guessed:.2f}",
         f"{one.direct.leak:.3f}", f"{one.direct.guessed:.2f}", f"{one.use:.2f}"]
        for one in found.questions
    ]  # fmt: skip
    head = [
        "question",
        "prior",
        "posterior",
        "IIL, nats",
        "guessed",
        "IIL, asked directly",
        "guessed, asked directly",
        "of use",
    ]
    return Table(f"leakage: {found.adversary}, {counted(found.k, 'part')}, worst first", head, rows)


def _rivals(found: Leakage) -> Table:
    """The same questions, asked otherwise."""
    ways = [("asked directly, once", found.direct), (f"in {counted(found.k, 'part')}", found.curve[-1])]
    if found.paraphrased is not None:
        ways.insert(1, ("asked directly, in other words", found.paraphrased))
    return Table("ways to ask", ["way", "IIL of the worst", "guessed"], [_row(name, one) for name, one in ways])


def _behind(found: Leakage) -> Table:
    assert found.behind is not None and found.epsilon is not None
    plain, behind = found.curve[-1], found.behind
    rows = [
        [*_row("as it is", plain), f"{found.use:.2f}", "–", "–"],
        [
            *_row(f"behind the wrapper, ε = {found.epsilon:g}", behind), f"{behind.use:.2f}", f"{behind.silent:.2f}",
            f"{found.k * found.epsilon:g}",
        ],
    ]  # fmt: skip
    head = ["", "IIL of the worst", "guessed", "of use", "empty", "proved bound, k · ε"]
    return Table("use against leakage", head, rows)


def _row(name: str, point: GivenAway) -> list[str]:
    return [name, f"{point.leak:.3f}", f"{point.guessed:.2f}"]


def _curve(found: Leakage) -> go.Figure:
    fig = figure(360, x="parts", y="nats", hovermode="x unified")
    parts = list(range(1, found.k + 1))
    mode = "lines+markers"
    fig.add_scatter(x=parts, y=[p.leak for p in found.curve], mode=mode, name="IIL of the worst", line={"color": BLUE})
    guessed = [point.guessed for point in found.curve]
    fig.add_scatter(x=parts, y=guessed, mode=mode, name="guessed", line={"color": ORANGE, "dash": "dot"}, yaxis="y2")
    fig.update_layout(yaxis2={"overlaying": "y", "side": "right", "range": [0, 1], "showgrid": False})
    fig.update_xaxes(tickvals=parts)
    return fig
