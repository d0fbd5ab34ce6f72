"""Freed memory stays in the process unless the user configures malloc."""

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
    """Return whether the process keeps freed memory, and the fresh pages it touches after warm-up."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, fresh = done.stdout.split()
    return kept == "True", int(fresh)


@pytest.mark.slow
def test_passes_touch_no_fresh_pages_unless_malloc_is_configured() -> None:
    kept, fresh = run()
    if not kept:
        pytest.skip("no glibc")
    # glibc's default behaviour depends on the top of the heap, so compare with a user's threshold: each of 120 tensors
    # then has its own mapping with at least two fresh pages.
    kept_freed, returned = run(MALLOC_MMAP_THRESHOLD_="262144")
    assert not kept_freed and returned >= 240
    assert fresh < returned / 20
