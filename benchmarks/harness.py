"""The harness of all benchmarks: repeats and processes, rows and claims, command line, tables and saved records.

Processes that a benchmark spawns import its module again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

# ---- paths, repeats, processes, run configurations and result files

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RUNS = ROOT / "runs" / "benchmarks"
DATA = Path(os.environ.get("PLANARIA_DATA", "data"))
CORES = len(os.sched_getaffinity(0))

Output = TypeVar("Output")


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def gaps(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(values, base, strict=True)]


def interleaved(sides: Sequence[Callable[[], float]], repeats: int) -> list[list[float]]:
    """Return the values of each side, repeat by repeat; every other repeat runs the sides in reverse."""
    found: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats):
        numbered = list(enumerate(sides))
        for n, side in numbered if repeat % 2 == 0 else reversed(numbered):
            found[n].append(side())
    return found


def in_processes(
    workers: int, job: Callable[..., Output], *arguments: Iterable[Any], begin: Callable[[], None] | None = None
) -> Iterator[Output]:
    """Yield ``job`` of the n-th of all arguments, in order, computed by spawned processes that first call ``begin``."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin) as pool:
        yield from pool.map(job, *arguments)


def by_case(
    workers: int,
    job: Callable[..., Output],
    cases: Iterable[tuple[Any, ...]],
    *given: Any,
    begin: Callable[[], None] | None = None,
) -> dict[Any, Output]:
    """Return ``job(*given, *case)`` of each case, computed by spawned processes; print each result."""
    found, known = dict[Any, Output](), list(cases)
    columns = [*([one] * len(known) for one in given), *zip(*known, strict=True)]
    for case, result in zip(known, in_processes(workers, job, *columns, begin=begin), strict=True):
        found[case] = result
        print(f"{', '.join(map(str, case))}: {result}"[:300], flush=True)
    return found


def run_config(name: str, **sections: Any) -> RunConfig:
    """Return the configuration of a run below runs/benchmarks."""
    from planaria.config.schema import RunConfig

    return RunConfig.model_validate({"name": name, "out": str(RUNS), **sections})


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def milliseconds(seconds: Sequence[float]) -> str:
    """The median of durations, for a column."""
    return f"{statistics.median(seconds) * 1e3:.1f} ms" if seconds else "–"


def file_of(name: str) -> Path:
    """Return the file that holds the result ``name``; for a new one, that of its longest prefix, or a new file."""
    for path in sorted(RESULTS.glob("*.json")):
        if name in json.loads(path.read_text()):
            return path
    words = name.split("_")
    paths = [RESULTS / f"{'_'.join(words[:count])}.json" for count in range(len(words), 0, -1)]
    return next((path for path in paths if path.exists()), paths[0])


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
    """Add or replace one result in its file, one line per result, atomically; return the file's path."""
    path = file_of(name)
    results = json.loads(path.read_text()) if path.is_file() else {}
    results = dict(sorted({**results, name: record}.items()))
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in results.items()
    )
    write(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def write(path: Path, text: str) -> None:
    """Write a file atomically; create its folder if needed."""
    from planaria.common import atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, text)


# ---- rows and claims


@dataclass(frozen=True)
class Claim:
    """The bounds of a judged value: ``low`` ≤ value ≤ ``high``, each where given."""

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
    """One measured quantity with all its repeats."""

    what: str
    values: Sequence[float]
    limit: str
    """the physical limit, measured or computed, in words and numbers"""
    claim: Claim | None = None
    """None: shown for comparison only"""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """further columns"""
    judged: Literal["median", "worst", "least"] = "median"
    """the statistic that the claim bounds; ``worst`` is the maximum"""

    @property
    def value(self) -> float:
        """The judged statistic; NaN without values."""
        if not self.values:
            return float("nan")
        validate: dict[str, Callable[[Sequence[float]], float]] = {
            "median": statistics.median,
            "worst": max,
            "least": min,
        }
        return validate[self.judged](self.values)

    @property
    def verdict(self) -> str:
        if self.claim is None:
            return ""
        return "PASS" if self.values and self.claim.holds(self.value) else "FAIL"


@dataclass(frozen=True)
class Result:
    """The rows of a benchmark, the notes below its table, and its name if it differs from the benchmark's."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    name: str = ""
    column: str = "measured"
    """heading of the judged values"""


Measurement = Sequence[Row] | Result | int
"""what a benchmark returns; an int is the exit code of a call that measures nothing"""


class Flag:
    """A flag with its default, its help and further options of ``add_argument``."""

    def __init__(self, default: Any, help: str | None = None, **options: Any) -> None:
        many = isinstance(default, list | tuple)
        one = default[0] if many and default else default
        if default is False:
            derived: dict[str, Any] = {"action": "store_true"}
        else:
            derived = {"type": Path if isinstance(one, Path) else type(one)} if one is not None and one != [] else {}
            derived |= {"nargs": "+"} if many else {}
        self.options = {"default": default, "help": help, **derived, **options}


def benchmark(name: str, /, **flags: Any) -> Callable[[Callable[..., Measurement]], Callable[[], int]]:
    """Make a command of a function that measures.

    The command parses ``flags`` (each a default or a :class:`Flag`), calls the function with them, prints the table,
    saves it if asked, and returns the exit code. The help text is the function's docstring, or its module's.
    """

    def decorate(measure: Callable[..., Measurement]) -> Callable[[], int]:
        doc = measure.__doc__ or sys.modules[measure.__module__].__doc__

        def command() -> int:
            args = parser(name, doc, flags).parse_args()
            found = measure(args)
            if isinstance(found, int):
                return found
            result = found if isinstance(found, Result) else Result(found)
            return conclude(result.name or name, args, result.rows, result.notes, result.column)

        command.__doc__ = doc
        return command

    return decorate


def parser(name: str, doc: str | None, flags: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's flags and ``--save``."""
    made = argparse.ArgumentParser(
        prog=" ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *_case]),
        description=inspect.cleandoc(doc or ""),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    made.add_argument("--save", action="store_true", help=f"write the numbers to results/{file_of(name).name} too")
    for key, flag in flags.items():
        options = (flag if isinstance(flag, Flag) else Flag(flag)).options
        made.add_argument(f"--{key.replace('_', '-')}", **options)
    return made


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the lines of the docstring and show defaults."""


_case: list[str] = []
"""the running case, if the benchmark has several"""


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
    program = f"python -m benchmarks.{Path(sys.argv[0]).stem}"
    rows = [f"  {name:14} {inspect.cleandoc(case.__doc__ or '').partition(chr(10))[0]}" for name, case in cases.items()]
    return "\n".join(
        [f"usage: {program} [CASE] [FLAGS]", "", "Without CASE, all cases run. CASE --help shows its flags.", "", *rows]
    )


# ---- tables and saved records


def conclude(
    name: str, args: Namespace, rows: Sequence[Row], notes: Sequence[str] = (), column: str = "measured"
) -> int:
    """Print the rows, save them if asked, and return the exit code: 1 if a claim does not hold."""
    show(name, rows, notes, column)
    if args.save:
        flags = {k: v for k, v in vars(args).items() if k != "save"}
        print(f"saved {save(name, flags, rows, notes).relative_to(ROOT)}")
    return int(any(row.verdict == "FAIL" for row in rows))


def show(name: str, rows: Sequence[Row], notes: Sequence[str], column: str = "measured") -> None:
    """Print the table; a pipe or file gets it 180 columns wide."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: {machine_line()}", title_justify="left")
    extra = list(dict.fromkeys(key for row in rows for key in row.columns))
    for head in ["", *extra, column, "spread", "limit", "claim", ""]:
        table.add_column(head, justify="left" if head in ("", "limit") else "right")
    for row in rows:
        shown = f"{row.value:.3f}" + ("" if row.judged == "median" else f" ({row.judged})")
        spread = f"{min(row.values):.3f} … {max(row.values):.3f} of {len(row.values)}" if row.values else "none"
        style = {"PASS": "green", "FAIL": "bold red"}.get(row.verdict, "")
        verdict = f"[{style}]{row.verdict}[/]" if style else ""
        cells = [f"{cell:.4g}" if isinstance(cell := row.columns.get(key, ""), float) else str(cell) for key in extra]
        table.add_row(row.what, *cells, shown, spread, row.limit, str(row.claim or ""), verdict)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def save(name: str, flags: Mapping[str, object], rows: Sequence[Row], notes: Sequence[str]) -> Path:
    """Save a benchmark's record in its result file and return the file's path."""
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_line(),
        "flags": {key: _portable(value) for key, value in flags.items()},
        "rows": [
            {
                "what": row.what,
                "judged": row.judged,
                "value": _finite(row.value),
                "values": [_finite(value) for value in row.values],
                "limit": row.limit,
                "claim": str(row.claim or ""),
                "verdict": row.verdict,
                **({"columns": dict(row.columns)} if row.columns else {}),
            }
            for row in rows
        ],
        "notes": list(notes),
    }
    return keep(name, record)


def machine_line() -> str:
    """The machine and its load average."""
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{CORES} cores, {platform.machine()}{gpu}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def _finite(value: float) -> float | None:
    """Return None, JSON's null, for values that are not finite."""
    return value if math.isfinite(value) else None


def _portable(value: object) -> object:
    """Return a flag's value for JSON: paths relative to the repository, others by their last component."""
    if isinstance(value, list):
        return [_portable(one) for one in value]
    if isinstance(value, Path):
        return str(value.relative_to(ROOT)) if value.is_relative_to(ROOT) else value.name
    return value
