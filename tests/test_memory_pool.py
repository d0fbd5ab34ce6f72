"""Memory that is freed stays with the process, unless its user has said how malloc is to do it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from planaria.common.memory_pool import keep_freed
import torch
def passes(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        held = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(24)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = keep_freed()
passes(3)
print(kept, passes(5))
"""


def run(**environment: str) -> tuple[bool, int]:
    """Does the process keep what it frees, and how many fresh pages does it touch once it has warmed up?"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, fresh = done.stdout.split()
    return kept == "True", int(fresh)


@pytest.mark.slow
def test_passes_touch_no_fresh_pages_unless_the_environment_has_malloc_give_them_back() -> None:
    kept, fresh = run()
    if not kept:
        pytest.skip("no glibc")
    # What glibc does by default goes by what happens to lie at the heap's top, so a threshold of the user's is the
    # other side: each of 120 tensors has its own mapping, and however large pages are, at least two fresh ones.
    left_alone, given_back = run(MALLOC_MMAP_THRESHOLD_="262144")
    assert not left_alone and given_back >= 240
    assert fresh < given_back / 20
