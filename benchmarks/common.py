"""What all benchmarks share: their flags, the table they print, the verdict on each row, and the JSON they leave.

Workers that a benchmark starts import its module again at their birth, so the modules here import at their top only
what is cheap; the rest is imported where it is used, as the command line does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
IMAGES = ROOT / "docs" / "images"
RUNS = ROOT / "runs" / "benchmarks"

FAMILIES = {
    "checkpoints": ("recut", "saves"),
    "codes": ("code_search",),
    "coded": ("coded_fleet",),
    "compare": ("advice", "pareto", "recovery"),
    "diagnosis": ("flapping", "reroute", "steering"),
    "edge": ("shared_memory", "wire"),
    "elastic": ("moments", "rejoin"),
    "exchange": ("stragglers",),
    "experts": ("worst_domain",),
    "generation": ("instruct",),
    "hostile": ("damage",),
    "inline": ("worker_cpu",),
    "ladder": ("edges",),
    "live_watchers": ("trackers_cost",),
    "lost_sets": ("snapshots",),
    "paths": ("relays",),
    "pipeline": ("simulator",),
    "planner": ("planned_run", "uniform"),
    "pretrained": ("outliers", "unfit"),
    "rollback": ("table2",),
}
"""result file → results that it holds besides those that start with its name"""
VARIANTS = frozenset(
    [
        "bursts",
        "compression",
        "diagnosis",
        "drills",
        "dume",
        "exchange",
        "experts",
        "gpu",
        "planner",
        "race",
        "robust",
        "swarm",
    ]
)
"""result files that hold every result named ``FILE_VARIANT``"""

Cell = float | int | str


@dataclass(frozen=True)
class Claim:
    """What a row must come to: ``low`` ≤ value ≤ ``high``, each where given."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g} – {self.high:g}"
        return f"≥ {self.low:g}" if self.high is None else f"≤ {self.high:g}"


@dataclass(frozen=True)
class Row:
    """One measured quantity. ``values`` are its repeats; the claim is held against their median, worst or least."""

    what: str
    values: Sequence[float]
    limit: str
    """the physical limit, measured or computed, in words and numbers"""
    claim: Claim | None = None
    """None: the row is shown for comparison only"""
    beside: Mapping[str, Cell] = field(default_factory=dict)
    """further columns: what was measured side by side"""
    judged: Literal["median", "worst", "least"] = "median"
    """the worst is the largest"""

    @property
    def value(self) -> float:
        """The number that is judged; with nothing measured, nan, which no claim holds for."""
        if not self.values:
            return float("nan")
        judge: dict[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "worst": max, "least": min}
        return judge[self.judged](self.values)

    @property
    def verdict(self) -> str:
        if self.claim is None:
            return ""
        return "PASS" if self.values and self.claim.holds(self.value) else "FAIL"


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's flags, ``--save`` among them; its module's docstring is the help text."""
    made = argparse.ArgumentParser(
        prog=" ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *_case]),
        description=inspect.cleandoc(doc or ""),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    made.add_argument("--save", action="store_true", help=f"write the numbers to results/{file_of(name).name} too")
    return made


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines and shows defaults."""


def conclude(
    name: str, given: argparse.Namespace, rows: Sequence[Row], notes: Sequence[str] = (), column: str = "measured"
) -> int:
    """Print the rows, save them if asked, and return the exit code: 1 when a claim does not hold."""
    show(name, rows, notes, column)
    if given.save:
        flags = {k: v for k, v in vars(given).items() if k != "save"}
        print(f"saved {save(name, flags, rows, notes).relative_to(ROOT)}")
    return int(any(row.verdict == "FAIL" for row in rows))


def show(name: str, rows: Sequence[Row], notes: Sequence[str], column: str = "measured") -> None:
    """The table on the terminal; a pipe or file gets it 180 columns wide."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: {machine_line()}", title_justify="left")
    extra = list(dict.fromkeys(key for row in rows for key in row.beside))
    for head in ["", *extra, column, "spread", "limit", "claim", ""]:
        table.add_column(head, justify="left" if head in ("", "limit") else "right")
    for row in rows:
        shown = f"{row.value:.3f}" + ("" if row.judged == "median" else f" ({row.judged})")
        spread = f"{min(row.values):.3f} … {max(row.values):.3f} of {len(row.values)}" if row.values else "none"
        style = {"PASS": "green", "FAIL": "bold red"}.get(row.verdict, "")
        verdict = f"[{style}]{row.verdict}[/]" if style else ""
        cells = [text(row.beside.get(key, "")) for key in extra]
        table.add_row(row.what, *cells, shown, spread, row.limit, str(row.claim or ""), verdict)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def save(name: str, flags: Mapping[str, object], rows: Sequence[Row], notes: Sequence[str]) -> Path:
    """Save a benchmark's record in its result file; return the file's path."""
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_line(),
        "flags": {key: _flag(value) for key, value in flags.items()},
        "rows": [
            {
                "what": row.what,
                "judged": row.judged,
                "value": _finite(row.value),
                "values": [_finite(value) for value in row.values],
                "limit": row.limit,
                "claim": str(row.claim or ""),
                "verdict": row.verdict,
                **({"beside": dict(row.beside)} if row.beside else {}),
            }
            for row in rows
        ],
        "notes": list(notes),
    }
    return keep(name, record)


def file_of(name: str) -> Path:
    """Return the result file that holds the result ``name``."""
    family = next((family for family, names in FAMILIES.items() if name in names), name)
    prefix = family.partition("_")[0]
    return RESULTS / f"{prefix if prefix in VARIANTS else family}.json"


def saved(name: str) -> dict[str, Any]:
    """Return the saved result ``name``, a benchmark's record or a comparison.

    :raises UserError: if no such result is saved.
    """
    from planaria.common.errors import UserError

    path = file_of(name)
    results = json.loads(path.read_text()) if path.is_file() else {}
    if name not in results:
        raise UserError(f"results/{path.name}: has no result {name!r}; save it first (results/README.md)")
    found: dict[str, Any] = results[name]
    return found


def keep(name: str, record: Mapping[str, object]) -> Path:
    """Add or replace one result in its file, a line for each, atomically; return the file's path."""
    path = file_of(name)
    results = json.loads(path.read_text()) if path.is_file() else {}
    results = dict(sorted({**results, name: record}.items()))
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in results.items()
    )
    write(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def write(path: Path, text: str) -> None:
    """The file with this text, whole or not at all."""
    from planaria.common import atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, text)


def text(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def machine_line() -> str:
    """What the numbers were measured on, and how busy it was besides."""
    import torch

    cores = len(os.sched_getaffinity(0))
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{cores} cores, {platform.machine()}{gpu}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def milliseconds(seconds: Sequence[float]) -> str:
    """Median of some durations, for a column."""
    return f"{statistics.median(seconds) * 1e3:.1f} ms" if seconds else "–"


def interleaved(sides: Sequence[Callable[[], float]], repeats: int) -> list[list[float]]:
    """What each side returned, repeat by repeat; every other repeat takes them in reverse, so that drift cancels."""
    found: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats):
        numbered = list(enumerate(sides))
        for n, side in numbered if repeat % 2 == 0 else reversed(numbered):
            found[n].append(side())
    return found


_case: list[str] = []
"""the case that runs, if the benchmark has several"""


def start(main: Callable[[], int] | None = None, **cases: Callable[[], int]) -> None:
    """Run a benchmark as a program, or one of its cases: ``python -m benchmarks.FILE CASE``; without CASE, all of them.

    Errors that the user can fix are printed in one line and exit with code 2.
    """
    if main:
        sys.exit(_run(main))
    if sys.argv[1:2] in [["-h"], ["--help"]]:
        print(_overview(cases))
        sys.exit()
    chosen = list(cases)
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        chosen = [sys.argv.pop(1)]
        if chosen[0] not in cases:
            print(f"benchmark: no case {chosen[0]!r}; choose from {', '.join(cases)}", file=sys.stderr)
            sys.exit(2)
    codes = []
    for name in chosen:
        _case[:] = [name]
        codes.append(_run(cases[name]))
    sys.exit(max(codes))


def _run(main: Callable[[], int]) -> int:
    from planaria.common.errors import RunStopped, UserError

    try:
        return main()
    except (UserError, RunStopped) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2


def _overview(cases: Mapping[str, Callable[[], int]]) -> str:
    """Each case with the first line of its description."""
    program = f"python -m benchmarks.{Path(sys.argv[0]).stem}"
    rows = [f"  {name:14} {inspect.cleandoc(case.__doc__ or '').partition(chr(10))[0]}" for name, case in cases.items()]
    return "\n".join(
        [f"usage: {program} [CASE] [FLAGS]", "", "Without CASE, all cases run. CASE --help shows its flags.", "", *rows]
    )


def _finite(value: float) -> float | None:
    """JSON has no word for what was never reached, or not measured."""
    return value if math.isfinite(value) else None


def _flag(value: object) -> object:
    """As it is saved: paths as they may be told, in lists too."""
    if isinstance(value, list):
        return [_flag(one) for one in value]
    return _told(value) if isinstance(value, Path) else value


def _told(path: Path) -> str:
    """A path as it reads on any machine; of one outside the repository, only the last word."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
