"""Import rules between packages, checked on the source."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from planaria.config.folders import FolderKind, folder_kinds

SOURCE = Path(__file__).parents[1] / "src"
RE_EXPORTING = (
    "config.schema",
    "control.facts.decisions",
    "control.facts.events",
    "data.shards",
    "pipeline.network.costs",
)
"""modules, besides packages, whose names may be defined in another module"""
LEVELS = (
    ("common",),
    ("config",),
    ("models", "data"),
    ("pipeline",),
    ("recovery", "exchange", "faults"),
    ("planner",),
    ("control",),
    ("runtime.transport",),
    ("runtime.fleet", "runtime.shared_log", "runtime.checkpoint"),
    ("runtime.custom_classes", "runtime.resolved_run", "trials"),
    ("runtime.controller", "runtime.worker", "faults.worker_faults"),
    ("runtime.preparation", "runtime.engine", "runtime.prediction", "faults.checks", "faults.injector"),
    ("report",),
    ("runtime.api", "runtime.standby", "group"),
    ("cli",),
    ("swarm",),
    ("lab",),
    ("__main__",),
)
"""packages, lowest first: each imports only its own level and those before"""
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
FEATURE_PARTS = {
    "_facts": "control",
    "_apply": "control",
    "_decisions": "control",
    "_worker": "runtime.worker",
    "_report": "report",
}
"""modules of ``exchange`` with these endings extend another package and belong to its level"""
PARTS = ("lab", "swarm")
"""what the core never imports"""
FACTS = (
    "facts.decisions",
    "facts.events",
    "facts.run_started",
    "facts.slowness",
    "log.writer",
    "log.reader",
    "log.run_record",
    "state.gauges",
    "state.memory_snapshots",
    "state.roster",
)
"""modules of ``control`` that reports read; none decides"""
DECIDING = (
    "decide",
    "exclusion",
    "slowness.decisions",
    "formation",
    "replay",
    "rounds",
    "checkpoint_decisions",
    "donors",
    "machine_loss_costs",
    "spares",
    "relays",
    "run_deadlines",
    "stop_reasons",
    "stuck_workers",
)
"""modules of ``control`` that decide"""


@cache
def modules() -> dict[str, ast.Module]:
    """Return every module of the project, parsed, by dotted name."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def imported(tree: ast.Module) -> set[str]:
    """Return the dotted names that a module imports anywhere, including names from modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the target package"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def neighbours(module: str) -> set[str]:
    """Return the modules of this project that ``module`` imports directly."""
    found = set()
    for name in imported(modules()[module]):
        if name.partition(".")[0] == "planaria":
            found.add(name if name in modules() else name.rpartition(".")[0])
    return found - {"planaria"}


@cache
def attributes(tree: ast.Module) -> set[str]:
    """Return every attribute access a.b in a module."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def room(module: str) -> str:
    """Return a module's package in :data:`LEVELS`; "" for the empty parent packages."""
    inner = module.removeprefix("planaria.")
    if inner.startswith("exchange."):
        for ending, extended in FEATURE_PARTS.items():
            if inner.endswith(ending):
                return extended
    return max((package for package in LEVEL if f"{inner}.".startswith(f"{package}.")), key=len, default="")


def observers() -> list[str]:
    """Return the modules that make reports."""
    reports = tuple(f"planaria.{part}.report" for part in PARTS)
    return [m for m in modules() if room(m) == "report" or m.startswith(reports)]


def test_every_module_belongs_to_a_level() -> None:
    assert len(modules()) > 50
    assert {m for m in modules() if not room(m)} == {"planaria", "planaria.runtime"}
    assert all(target in modules() for module in modules() for target in neighbours(module))


def test_imports_go_downwards_only() -> None:
    upward = [
        f"{module} imports {target}"
        for module in modules()
        if room(module)
        for target in neighbours(module)
        if LEVEL[room(target)] > LEVEL[room(module)]
    ]
    assert not upward


def test_only_commands_import_the_command_line() -> None:
    importers = {m for m in modules() for target in neighbours(m) if room(target) == "cli"} - {"planaria.__main__"}
    commands = (*(f"planaria.{name}" for name in ("cli", "lab.commands", "swarm.commands")),)
    assert not [m for m in importers if not m.startswith(commands)]


def test_importing_the_core_loads_no_other_part() -> None:
    """Imports by name count too."""
    names = [m for m in modules() if room(m).partition(".")[0] not in (*PARTS, "cli", "__main__")]
    names = [m for m in names if not m.startswith("planaria.group.integrations.")]  # their packages are optional
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names!r}]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "planaria.runtime.worker.worker" in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"planaria.{part}" for part in PARTS))]


def test_the_core_reaches_other_parts_by_registration_only() -> None:
    """``planaria`` itself names the public interface."""
    core = {m: tree for m, tree in modules().items() if room(m).partition(".")[0] not in PARTS}
    del core["planaria"]
    inner = tuple(f"planaria.{part}." for part in PARTS)
    assert not [f"{m} imports {target}" for m in core for target in neighbours(m) if f"{target}.".startswith(inner)]
    by_name = {
        m
        for m, tree in core.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith(inner)
    }
    assert by_name == {"planaria.cli.entry"}


def test_a_runs_report_and_check_load_kinds_of_other_parts_only(tmp_path: Path) -> None:
    code = (
        "import sys; from planaria.cli.entry import run\n"
        "for words in (['report'], ['run', 'check'], ['run', 'check', '--accept']):\n"
        f"    try: run([*words, {str(tmp_path)!r}])\n"
        "    except Exception as error: assert type(error).__name__ == 'UserError'\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    others = {name for name in loaded if name.startswith(tuple(f"planaria.{part}" for part in PARTS))}
    assert others == {f"planaria.{part}{kinds}" for part in PARTS for kinds in ("", ".folder_kinds")}


def test_without_a_fault_a_worker_imports_no_injector() -> None:
    code = "import sys, planaria.runtime.worker.worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "planaria.runtime.worker.worker" in loaded
    assert not [name for name in loaded if name.startswith("planaria.faults")]
    lazily = [ast.unparse(node) for node in ast.walk(modules()["planaria.runtime.worker.worker"])
              if isinstance(node, ast.ImportFrom) and str(node.module).startswith("planaria.faults")]  # fmt: skip
    assert set(lazily) == {"from planaria.faults.worker_faults import WorkerFaults"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "code",
    [
        "import planaria; planaria.train, planaria.load, planaria.Run",
        "from planaria.cli.entry import run; run(['train', 'demo', '--dry-run'])",
    ],
)
def test_training_loads_no_other_part(code: str) -> None:
    code = f"import sys; {code}; print('loaded:', *sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = shown.rpartition("loaded:")[2].split()
    assert "planaria" in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"planaria.{part}" for part in PARTS))]


def test_imports_have_no_cycles() -> None:
    try:
        graphlib.TopologicalSorter({module: neighbours(module) for module in modules()}).prepare()
    except graphlib.CycleError as cycle:
        pytest.fail(" imports ".join(reversed(cycle.args[1])))


def test_names_have_one_import_path() -> None:
    """``mypy --strict`` rejects imports of names that a module neither defines nor imports ``as`` themselves."""
    packages = {m.rpartition(".")[0] for m in modules()}
    re_exporting = {
        m
        for m, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == alias.asname for alias in node.names)
    }
    assert re_exporting - packages == {f"planaria.{name}" for name in RE_EXPORTING}


@pytest.mark.parametrize(
    "forbidden",
    [
        "runtime.engine",
        "runtime.worker",
        "runtime.prediction",
        "models",
        "runtime.transport",
        "runtime.fleet",
        "runtime.controller",
        "runtime.checkpoint",
        "pipeline.plan",
    ],
)
def test_reports_read_events_only(forbidden: str) -> None:
    assert not [f"{m} imports {n}" for m in observers() for n in neighbours(m) if n.startswith(f"planaria.{forbidden}")]


def test_reports_read_facts_of_control_only() -> None:
    read = {n for m in observers() for n in neighbours(m) if n.startswith("planaria.control")}
    assert read == {f"planaria.control.{name}" for name in FACTS}


def test_facts_import_neither_state_nor_log() -> None:
    facts = [m for m in modules() if m.startswith("planaria.control.facts.")]
    control = {n for m in facts for n in neighbours(m) if n.startswith("planaria.control.")}
    assert facts and control <= {*facts}


def test_applying_events_imports_no_deciding_module() -> None:
    """Follows the imports of ``apply`` transitively."""
    seen, left = set(), ["planaria.control.apply", *(f"planaria.control.{name}" for name in FACTS)]
    while left:
        module = left.pop()
        seen.add(module)
        left += neighbours(module) - seen
    assert "planaria.control.apply_base" in seen
    assert not seen & {f"planaria.control.{name}" for name in DECIDING}
    assert "planaria.exchange.robust.exclusion_decisions" not in seen


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("torch.distributed", {"runtime.checkpoint", "group"}),
        ("ssl", {"runtime.fleet", "runtime.shared_log", "runtime.transport"}),
        ("multiprocessing", {"runtime.fleet", "runtime.engine", "swarm"}),
        ("ray", {"runtime.fleet"}),
        ("pickle", {"runtime.checkpoint"}),
        ("socket", {"runtime.fleet", "runtime.shared_log", "runtime.transport"}),
    ],
)
def test_sensitive_libraries_are_imported_in_their_packages_only(library: str, rooms: set[str]) -> None:
    users = {m for m, tree in modules().items() if any(f"{n}.".startswith(f"{library}.") for n in imported(tree))}
    users |= {m for m, tree in modules().items() if library in attributes(tree)}
    assert {room(m) for m in users} <= rooms


def test_only_one_swarm_module_uses_processes() -> None:
    doors = ("multiprocessing.", "planaria.runtime.fleet.spawner.")
    users = {m for m, tree in modules().items() if any(f"{n}.".startswith(doors) for n in imported(tree))}
    inner = {m for m in users if room(m) == "swarm" and ".commands." not in m}
    assert inner == {"planaria.swarm.swarm_processes"}


def test_ray_is_imported_by_two_modules_that_are_imported_lazily() -> None:
    users = [m for m, tree in modules().items() if any(f"{n}.".startswith("ray.") for n in imported(tree))]
    ray = ["planaria.runtime.fleet.ray", "planaria.runtime.fleet.ray_machines"]
    assert users == ray
    tops = {
        m: [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for m, tree in modules().items()
    }
    eager = [m for m, top in tops.items() if any("planaria.runtime.fleet.ray" in ast.unparse(node) for node in top)]
    assert eager == ray[1:], "which imports the first"


def test_strategies_use_no_process_socket_clock_or_file() -> None:
    outside = {"time", "threading", "subprocess", "socket", "queue", "os", "shutil", "signal"}
    pure = [m for m in modules() if room(m) in ("pipeline", "recovery", "exchange")]
    pure += [f"planaria.control.{name}" for name in ("apply", "decide", "state.run", "replay")]
    assert not [f"{m} imports {n}" for m in pure for n in imported(modules()[m]) if n.partition(".")[0] in outside]


def test_one_module_opens_file_systems() -> None:
    opens = {"fsspec.core.url_to_fs", "fsspec.open", "fsspec.filesystem", "fsspec.open_files"}
    assert [m for m, tree in modules().items() if attributes(tree) & opens] == ["planaria.common.filesystems"]


FOREIGN = "planaria.runtime.checkpoint.foreign"


def test_pickles_are_read_in_a_separate_process_only() -> None:
    """Restricts the modules that write pickles, read them, and import the readers."""
    calls = {"torch.load", "torch.save", "np.load", "numpy.load"}
    users = {module: used for module, tree in modules().items() if (used := attributes(tree) & calls)}
    assert users == {f"{FOREIGN}.unpickling": {"torch.load"}, f"{FOREIGN}.universal": {"torch.save"}}
    loads = [node for node in ast.walk(modules()[f"{FOREIGN}.unpickling"]) if isinstance(node, ast.Call)]
    (load,) = (node for node in loads if ast.unparse(node.func) == "torch.load")
    assert any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in load.keywords)
    importers = {m: {n.partition(".")[0] for n in imported(tree)} for m, tree in modules().items()}
    assert [m for m, roots in importers.items() if "pickle" in roots] == [f"{FOREIGN}.unpickling"]
    checkpoints = [m for m, tree in modules().items() if "torch.distributed.checkpoint" in " ".join(imported(tree))]
    assert checkpoints == [f"{FOREIGN}.dcp"]
    assert not [m for m in modules() if f"{FOREIGN}.reading" in neighbours(m)]
    readers = {f"{FOREIGN}.dcp.Dcp", f"{FOREIGN}.universal.Universal", f"{FOREIGN}.unpickling.saved"}
    assert {m for m, tree in modules().items() if imported(tree) & readers} == {f"{FOREIGN}.reading"}


def test_few_short_modules_have_a_single_importer() -> None:
    """Fold those of under 60 lines into their importer, unless they are plug-ins or formulas, and lower the bound.

    Plug-ins that their package registers are not counted.
    """
    users: dict[str, set[str]] = {}
    for module in modules():
        for target in neighbours(module):
            users.setdefault(target, set()).add(module)
    short = {m for m, tree in modules().items() if tree.body and (tree.body[-1].end_lineno or 0) < 60}
    scraps = sorted(m for m in short if len(users.get(m, ())) == 1 and users[m] != {m.rpartition(".")[0]})
    assert len(scraps) <= 16, scraps


def test_no_function_exceeds_65_lines() -> None:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [(m, n) for m, tree in modules().items() for n in ast.walk(tree) if isinstance(n, functions)]
    assert not [f"{m}.{n.name}" for m, n in nodes if (n.end_lineno or 0) - n.lineno >= 65]


def test_no_module_exceeds_400_lines() -> None:
    long = {m: n for m, tree in modules().items() if tree.body and (n := tree.body[-1].end_lineno or 0) > 400}
    assert not long


@pytest.mark.parametrize("kind", folder_kinds(), ids=lambda kind: kind.name)
def test_functions_of_folders_exist(kind: FolderKind) -> None:
    assert all(callable(kind.function(name)) for name in kind.functions)
