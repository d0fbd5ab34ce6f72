"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# One thread per process: with two and a busy neighbour, steps take many times as long.
torch.set_num_threads(1)

# On a busy machine, how long one example took says nothing.
settings.register_profile("planaria", deadline=None)
settings.load_profile("planaria")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts and small models beside the repository, or wherever PLANARIA_DATA says; else skips."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PLANARIA_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder} (set PLANARIA_DATA)")
    return folder
