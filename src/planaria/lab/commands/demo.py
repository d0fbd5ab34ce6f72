"""``planaria lab demo``: train variants of one recipe on the fleet, and compare their loss over seconds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import plotly.graph_objects as go

from planaria.common import atomic
from planaria.common.errors import UserError, missing_package, suggestion
from planaria.config.shipped import find
from planaria.control.facts.decisions import RunStep
from planaria.lab.report import for_paper
from planaria.report import page, theme
from planaria.report.tables import Table, show
from planaria.report.verdict import Verdict
from planaria.runtime.api.configure import configure
from planaria.runtime.api.run import Run
from planaria.runtime.api.training import train
from planaria.runtime.engine.run_fleet import preload_for
from planaria.runtime.fleet.spawner import fork_server
from planaria.runtime.preparation.config_checks import check, read_faults


class Demo(NamedTuple):
    """A shipped recipe and the settings of each arm; the first arm is the reference."""

    recipe: str
    arms: Mapping[str, Mapping[str, object]]


DEMOS = {
    "home-links": Demo(
        "home_links",
        {
            "bf16": {"pipeline.wire": "bf16", "chaos.trace": None},
            "6/4": {"pipeline.wire": "6/4", "chaos.trace": None},
            "6/4, one SIGKILL": {"pipeline.wire": "6/4"},
        },
    )
}
SMOOTHING_STEPS = 4
"""steps in a mean of the training loss"""
HEAD = ("arm", "s/step", "MB/step", "loss", "validation", "total s", "s to the first arm's loss", "recovery, s")
AXES = ("seconds of training", f"training loss, mean of {SMOOTHING_STEPS} steps")


@dataclass(frozen=True)
class Outcome:
    """Measurements of one arm. Seconds count from the start of the first training step."""

    arm: str
    run: str
    """folder"""
    times: list[float]
    """seconds at the end of each step, including steps that a rollback undid"""
    losses: list[float]
    """training loss of each step, nats per token"""
    step_s: float
    """median seconds of a step"""
    step_bytes: float
    """median payload of a step over all edges, both directions, with the copies of a recovery strategy"""
    validation: float | None
    """loss after the last step"""
    recoveries_s: list[float]
    """seconds from each fault to the next completed microbatch"""

    @property
    def smoothed(self) -> list[float]:
        """Moving average of the loss over :data:`SMOOTHING_STEPS` steps."""
        return [fmean(self.losses[max(0, end - SMOOTHING_STEPS) : end]) for end in range(1, len(self.losses) + 1)]

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds until the smoothed loss is at most ``loss``, or None if it never is."""
        return next((t for t, own in zip(self.times, self.smoothed, strict=True) if own <= loss), None)


def measure_outcome(arm: str, run: Run) -> Outcome:
    """Return the measurements of a finished run."""
    record = run.record
    start = next(t for t, fact in record.history if isinstance(fact, RunStep) and fact.mode == "train")
    trained = list(record.trained)
    times = [metric.t - start for metric in trained]
    sent: dict[int, int] = defaultdict(int)
    for _, work in record.worked:
        if any(span.action == "backward" for span in work.spans):  # not a validation
            sent[work.step] += sum(work.sent_bytes.values())
    return Outcome(
        arm,
        str(run.folder),
        times,
        [metric.loss for metric in trained],
        median(b - a for a, b in pairwise([0.0, *times])),
        median(sent.values()) if sent else 0.0,
        run.validations.get(run.config.train.steps),
        [timing.total for timing in run.recoveries if timing.total is not None],
    )


def demo(name: str, settings: Mapping[str, str], to: Path | None, quiet: bool) -> int:
    """Run a demo, print its table, and write its report and numbers; return the exit code.

    :raises UserError: for an unknown name, an invalid setting, or a chart that cannot be drawn.
    """
    if name not in DEMOS:
        raise UserError(f"{name}: unknown demo; {suggestion(name, DEMOS)}")
    recipe, arms = DEMOS[name]
    if fixed := sorted(settings.keys() & arms[next(iter(arms))].keys() - {"chaos.trace"}):
        raise UserError(f"--{fixed[0]} {settings[fixed[0]]}: differs between the arms of {name}; remove it")
    if to is not None:
        _require_drawable(to)
    path, common = find(recipe), dict[str, object](settings)
    common["out"] = out = str(Path(settings.get("out", "runs")) / name)
    configs = {
        arm: configure(path, settings={**common, "name": page.slug(arm).lower(), **own}) for arm, own in arms.items()
    }
    for config in configs.values():
        read_faults(check(config))
    fork_server(preload_for(next(iter(configs.values()))))
    outcomes = []
    for number, (arm, config) in enumerate(configs.items(), 1):
        print(f"{number}/{len(arms)}  {arm}: {config.train.steps} steps", flush=True)
        outcomes.append(measure_outcome(arm, train(config, progress=not quiet)))
    table = Table(f"{name}: {AXES[1].partition(',')[0]} and seconds", HEAD, list(rows(outcomes)))
    show([table])
    if to is not None:
        _draw(outcomes, to)
        print(f"chart         {to}")
    numbers = Path(out) / "demo.json"
    atomic.write_text(numbers, json.dumps({"command": f"planaria lab demo {name}", "arms": [*map(asdict, outcomes)]}))
    text = page.document(f"{name} · planaria", body(name, outcomes, table))
    print(f"report        {page.write(numbers.with_name('report.html'), text)}\nnumbers       {numbers}")
    return 0


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """Yield the cells of each arm under :data:`HEAD`."""
    target = outcomes[0].smoothed[-1]
    for own in outcomes:
        reached = own.seconds_to(target)
        yield [
            own.arm,
            f"{own.step_s:.2f}",
            f"{own.step_bytes / 1e6:.1f}",
            f"{own.smoothed[-1]:.3f}",
            "–" if own.validation is None else f"{own.validation:.3f}",
            f"{own.times[-1]:.1f}",
            f"not reached ({own.smoothed[-1] - target:+z.3f})" if reached is None else f"{reached:.1f}",
            ", ".join(f"{seconds:.2f}" for seconds in own.recoveries_s) or "–",
        ]


def loss_figure(outcomes: Sequence[Outcome]) -> go.Figure:
    """Plot the smoothed training loss of each arm over seconds."""
    fig = theme.figure(420, x=AXES[0], y=AXES[1], hovermode="closest")
    for index, own in enumerate(outcomes):
        points = list(zip(own.times, own.smoothed, strict=True))
        style: dict[str, Any] = theme.stroke(index, len(outcomes))
        theme.add_curve(fig, points, "%{x:.1f} s: %{y:.3f}", name=own.arm, mode="lines+markers", **style)
    return fig.update_xaxes(rangemode="tozero")


def body(name: str, outcomes: Sequence[Outcome], table: Table) -> Iterator[str]:
    """Yield the sections of the report."""
    first, second = outcomes[:2]
    numbers = [
        (f"{second.step_s / first.step_s:.2f} ×", f"seconds per step of {second.arm}, over {first.arm}"),
        (f"{first.step_bytes / max(1.0, second.step_bytes):.1f} ×", f"fewer bytes with {second.arm}"),
    ]
    losses = ", ".join(f"{own.smoothed[-1] - first.smoothed[-1]:+z.3f} ({own.arm})" for own in outcomes[1:])
    cost = f"Final loss minus that of {first.arm}, nats: {losses}. One seed: small differences may be noise."
    summary = f"{len(outcomes)} runs with the same seed, samples and steps finished."
    yield page.heading(name, Verdict(True, "finished", summary, numbers, cost), "Real processes, emulated links.")
    yield page.section("Loss over time", "From the first training step.", page.chart(loss_figure(outcomes), "loss"))
    yield page.section("Arms", "Medians of steps; payload over all edges.", table.html("arms"))
    yield page.footer(f"Written by planaria lab demo {name}; demo.json next to this page has every number.")


def _require_drawable(to: Path) -> None:
    """:raises UserError: if the chart cannot be drawn in the format of this file."""
    if to.suffix[1:] not in for_paper.FORMATS:
        raise UserError(f"--to {to}: use a file name that ends with .{' or .'.join(for_paper.FORMATS)}")
    if find_spec("matplotlib") is None:
        raise missing_package(f"--to {to}", "matplotlib", "figures")


def _draw(outcomes: Sequence[Outcome], to: Path) -> None:
    """Draw the chart with matplotlib."""
    figure, axes = for_paper.empty_figure(for_paper.HEIGHT)
    for own, colour in zip(outcomes, theme.SERIES, strict=False):
        axes.plot(own.times, own.smoothed, color=colour, linewidth=1.4, marker=".", label=for_paper.plain_text(own.arm))
    axes.set_xlim(left=0)
    axes.set_xlabel(AXES[0])
    axes.set_ylabel(AXES[1])
    axes.legend(fontsize=8, frameon=False)
    try:
        atomic.write_bytes(to, for_paper.encode(figure, to.suffix[1:]))
    except OSError as error:
        raise UserError(f"--to {to}: cannot be written ({error.strerror}); use another file") from None
