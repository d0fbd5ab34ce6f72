"""Configuration and fixtures of all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, settings

from planaria.common.cache import cache_folder
from planaria.common.errors import UserError
from support.checkout import checkout_files

# One thread per process: two threads on a busy machine make steps many times as long.
torch.set_num_threads(1)

# Compiled code is cached in the user's cache for all tests: compiling it takes half a minute.
with suppress(UserError):
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "compiled"))

# Durations are meaningless on a busy machine. Examples are the same in every run; `make hunt` searches for new ones.
# Explaining a failure traces every line, which takes several times as long before Python 3.12.
phases = [phase for phase in Phase if phase is not Phase.explain]
settings.register_profile("planaria", deadline=None, derandomize=True, phases=phases, max_examples=50)
settings.register_profile("hunt", deadline=None, print_blob=True, phases=phases, max_examples=200)
settings.load_profile(os.environ.get("PLANARIA_EXAMPLES", "planaria"))

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig

CHECKOUT = pytest.StashKey[dict[str, tuple[int, int]]]()
CHANGED = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the checkout's files before the first test; parallel workers leave this to their parent."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[CHECKOUT] = checkout_files(session.config.rootpath)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a test has created, changed or removed a file of the checkout."""
    before = session.config.stash.get(CHECKOUT, None)
    if before is None:
        return
    after = checkout_files(session.config.rootpath)
    changed = sorted(path for path in before | after if before.get(path) != after.get(path))
    if changed:
        session.config.stash[CHANGED] = changed
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the changed files after the failures, where they are read."""
    if changed := config.stash.get(CHANGED, []):
        names = ", ".join(changed[:8]) + (", …" if len(changed) > 8 else "")
        terminalreporter.write_line(f"ERROR: {len(changed)} files of the checkout changed during the tests: {names}")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection; a full pass takes a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before those that are slow are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but the first ``n`` parameter sets of a test marked ``slow_after(n)`` as slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("slow_after")) is not None:
            name = item.nodeid.partition("[")[0]
            seen[name] += item.get_closest_marker("slow") is None
            if seen[name] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up fixtures of modules and of the session in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        yield


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own temporary folder, so that relative paths reach nothing else."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seed torch, so that results do not depend on the tests before."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed would format a stack trace for a GPU that is not there
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this session, for this process and its children."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the text of :func:`config`."""
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture
def config(corpus_folder: Path) -> Callable[..., RunConfig]:
    """Makes the recipe of ``support.tiny_engine``, with single fields of its sections changed."""
    from support.tiny_engine import config_in

    return partial(config_in, corpus_folder)


@pytest.fixture
def allow_code() -> Iterator[None]:
    """Permission to import a test's own classes (``--allow-code``)."""
    from planaria.config.consent import permit_code

    with permit_code():
        yield


@pytest.fixture(scope="session")
def pupil(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small policy that solves one sum in five."""
    from planaria.swarm.config.policy_config import PolicyConfig, SmallModel, SupervisedWarmupConfig
    from planaria.swarm.policy.policies import LlamaPolicy
    from planaria.swarm.policy.sources import warmup_model
    from planaria.swarm.tasks.sums import Sums

    warmup = SupervisedWarmupConfig(steps=250, lr=0.01, noise=0.05, stray_letter_probability=0.0)
    model, tokenizer = warmup_model(Sums(), warmup, PolicyConfig(model=SmallModel(dim=32, hidden=64)))
    folder = tmp_path_factory.mktemp("pupil")
    LlamaPolicy(model, tokenizer).export(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts and small models (PLANARIA_DATA, or beside the repository); else skip."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PLANARIA_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder} (set PLANARIA_DATA)")
    return folder
