"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# One thread per process: with two and a busy neighbour, steps take many times as long.
torch.set_num_threads(1)

# On a busy machine, how long one example took says nothing. The examples are the same in every run; `make hunt` looks
# for new ones.
settings.register_profile("planaria", deadline=None, derandomize=True)
settings.register_profile("hunt", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("PLANARIA_EXAMPLES", "planaria"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this session, for this process and those it starts: a school is attended once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def pupil(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small policy that solves one sum in five, as a folder: peers of tests start with it."""
    from planaria.swarm.config import PolicyConfig, SchoolConfig, SmallModel
    from planaria.swarm.policy.policies import LlamaPolicy
    from planaria.swarm.policy.school import graduate
    from planaria.tasks.sums import Sums

    school = SchoolConfig(steps=250, lr=0.01, noise=0.05, strays=0.0)
    model, tokenizer = graduate(Sums(), school, PolicyConfig(model=SmallModel(dim=32, hidden=64)))
    folder = tmp_path_factory.mktemp("pupil")
    LlamaPolicy(model, tokenizer).export(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts and small models beside the repository, or wherever PLANARIA_DATA says; else skips."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PLANARIA_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder} (set PLANARIA_DATA)")
    return folder
