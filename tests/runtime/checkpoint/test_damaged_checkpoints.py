"""A damaged checkpoint is refused in one line when it is resumed at any cut, and by ``verify``."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

import planaria
from planaria.cli.commands.checkpoint import verify_checkpoints
from planaria.common.errors import UserError
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.preparation.resumption import resumption_of
from support.checkpoint_damage import Case, cases
from support.live.harness import tiny

STEP = "step-00000002"
SLACK = 48 << 20
"""bytes that reading a checkpoint of some kilobytes may take, also with a header of a hundred thousand entries"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs of one replica and of two."""
    home = tmp_path_factory.mktemp("damage")
    small = {"dim": 8, "hidden": 8, "context": 4}
    for name, replicas in (("one", 1), ("two", 2)):
        exchange = {"replicas": replicas, "kind": "noloco", "options": {"every": 1}}
        config = tiny(home, stages=2, steps=2, model=small, checkpoint={"every": 1}, exchange=exchange)
        planaria.train(config.model_copy(update={"engine": "inline", "name": name}), progress=False)
    return home / "runs"


ALL = [("one", case) for case in cases(2)] + [("two", case) for case in cases(2, "replica-1/")[::5]]


def resumed(run: Path, **changes: object) -> None:
    """Do all that precedes the first step: the checks before a worker starts, and the loading by each worker."""
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    there = resumption_of(run, {"train.steps": 9, **settings}, STEP, str)
    for stage, replica in product(range(there.config.pipeline.stages + 1), range(there.config.exchange.replicas)):
        load_stage(there.store.folder / there.origin.load[stage], there.config, stage, replica)


WAYS: dict[str, Callable[[Path], object]] = {
    "resumed": resumed,
    "resumed at another cut": lambda run: resumed(run, pipeline__stages=1),
    "resumed as other replicas": lambda run: resumed(run, exchange__replicas=3),
    "verified": lambda run: list(verify_checkpoints(run, STEP)),
}


def test_there_are_two_hundred_distinct_cases() -> None:
    assert len(ALL) >= 200 and len({(run, case.name) for run, case in ALL}) == len(ALL)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_sound_checkpoint_is_read(name: str, home: Path) -> None:
    for take in WAYS.values():
        take(home / name)


@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{run}: {case.name}" for run, case in ALL])
def test_a_damaged_checkpoint_is_refused(name: str, case: Case, home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / name, tmp_path / "run"))
    folder = run / "checkpoints" / STEP
    case.damage(folder, random.Random(case.name))
    before = there(run)
    messages = {}
    with modest_memory():
        for way, take in WAYS.items():
            if way == "resumed as other replicas" and name == "one":
                continue
            with pytest.raises(UserError) as caught:
                take(run)
            messages[way] = str(caught.value)
    for way, line in messages.items():
        assert "\n" not in line and len(line) < 1000, way
        assert str(folder) in line and case.expected in line, (way, line)
        assert Path(case.file).name in line or "manifest" in case.file, (way, line)
    assert there(run) == before and not list(tmp_path.rglob("executed"))


def there(run: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file in a run, links as links."""
    return {str(path): ((s := path.lstat()).st_size, s.st_mtime_ns) for path in run.rglob("*")}


@contextmanager
def modest_memory() -> Iterator[None]:
    """Fail if the process takes more than ``SLACK`` bytes meanwhile, where the system measures it."""
    if not (peak := Path("/proc/self/clear_refs")).exists():
        yield
        return
    peak.write_text("5")
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before < SLACK


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
