"""Helpers of the benchmarks: paths, repeats, processes, run configurations and result files."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
IMAGES = ROOT / "docs" / "images"
RUNS = ROOT / "runs" / "benchmarks"
DATA = Path(os.environ.get("PLANARIA_DATA", "data"))
CORES = len(os.sched_getaffinity(0))

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
    "fine_tuning": ("fine_tuning_faults",),
    "generation": ("instruct",),
    "hostile": ("damage",),
    "home_links": (
        "home_links_codec",
        "home_links_demo",
        "home_links_loss",
        "home_links_subspace",
        "home_links_failures",
        "home_links_fleet",
    ),
    "inline": ("worker_cpu",),
    "ladder": ("edges",),
    "live_watchers": ("trackers_cost",),
    "lost_sets": ("snapshots",),
    "paths": ("relays",),
    "pipeline": ("simulator",),
    "planner": ("planned_run", "uniform"),
    "pretrained": ("decoders", "outliers", "unfit"),
    "real_decoders": ("real_decoders_gemma", "real_decoders_memory"),
    "rollback": ("table2",),
    "standby": ("standby_cost",),
}
"""result file → names of its results that do not start with the file's name"""
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

Output = TypeVar("Output")


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the quotients of paired repeats."""
    return [a / b for a, b in zip(over, under, strict=True)]


def gaps(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the differences of paired repeats."""
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
