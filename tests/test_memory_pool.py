"""Memory that is freed stays with the process, unless its user has said how malloc is to do it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from planaria.memory_pool import keep_freed
def passes(count):
    import torch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        held = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(24)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
passes(3)
given_back = passes(5)
kept = keep_freed()
passes(3)
print(kept, given_back, passes(5))
"""


def run(**environment: str) -> tuple[bool, int, int]:
    """Did the process keep what it frees? Fresh pages that it touched before, and after."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, before, after = done.stdout.split()
    return kept == "True", int(before), int(after)


def test_the_next_pass_touches_no_fresh_pages() -> None:
    kept, before, after = run()
    if not kept:
        pytest.skip("no glibc")
    assert before > 10_000, "24 tensors of 1,024 pages each, given back in part"
    assert after < before / 50


def test_thresholds_in_the_environment_are_left_alone() -> None:
    kept, _, after = run(MALLOC_MMAP_THRESHOLD_="262144")
    assert not kept and after > 10_000
